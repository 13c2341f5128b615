"""What scripts made for DeepSpeed find in the mode, on two ranks (mode_job.py), and the routes of zerorun.integrations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_clients import compare, found_by

from zerorun.errors import StepError


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return found_by("mode")


def test_parameters_have_what_scripts_ask_for(found: dict[str, Any]) -> None:
    seen = found["parameters"]
    numel, shape, status, part = seen["attributes"]
    assert (numel, shape, status) == (512, [32, 16], "NOT_AVAILABLE") and 0 <= part <= 512
    assert seen["inside"] == "AVAILABLE" and seen["numbers"] and not seen["others have none"]


def test_parameters_without_an_engine_have_it_too(found: dict[str, Any]) -> None:
    """Also while they are gathered: all attributes were missing there."""
    before, inside, values, after = found["in init"]
    assert before == after and before[1:] == ["NOT_AVAILABLE", 8]
    assert inside == [before[0], "AVAILABLE", 8] and values == [[4, 4], 16, True]


def test_state_dicts_of_stage_3_cannot_be_saved(found: dict[str, Any]) -> None:
    """They have the shapes; but a file would hold NaN."""
    seen = found["parameters"]
    assert seen["shape"] == [[32, 16], 512, 21]
    for text in seen["saved"] + seen["copied"]:
        assert text.startswith("ReleasedParameterError") and "Remedy: engine.state_dict()" in text


def test_whole_models(found: dict[str, Any]) -> None:
    """save_16bit_model() writes at stage 3 only if the file asks for it; zero_to_fp32 reads zerorun's checkpoints."""
    seen = found["parameters"]
    assert seen["not asked for"] is False and seen["merged"] and seen["converted"] == ["model.safetensors"]


@pytest.mark.parametrize("where", ("", " beside Trainer"))
def test_what_deepspeed_reads_over_is_no_error(found: dict[str, Any], where: str) -> None:
    """Beside Trainer, as for the reference models of TRL, the file is read once more before the engine is made."""
    over, wrong = found[f"ignored{where}"]
    assert over == "nothing"
    assert wrong.startswith("ConfigError") and "sub_grup_size" in wrong


def test_an_engine_that_goes_on_by_itself_is_told(found: dict[str, Any]) -> None:
    """Loops made for DeepSpeed count their steps from 0, and would make all of them again."""
    told, refused = found["resuming"]
    assert told.startswith("the engine has gone on from step 1 by itself")
    assert refused.startswith("ConfigError") and "checkpoint.auto_resume = true" in refused
    assert "resume_from_checkpoint" in refused


def test_optimizers_and_schedules_of_their_names(found: dict[str, Any]) -> None:
    """By hand and by accelerate, with torch's optimizer, the losses are the same."""
    assert found["kernels"] == pytest.approx(found["accelerated"], abs=1e-6)


def test_an_optimizer_that_is_kept_keeps_no_engine(found: dict[str, Any]) -> None:
    gone, text = found["kept"]
    assert gone and text.startswith("StepError the engine of this optimizer is gone")


def test_callback_of_trainer(found: dict[str, Any]) -> None:
    assert len(found["logged"]) == 2 and all("skipped_steps" in entry for entry in found["logged"])


def test_a_model_that_makes_another_one_equals_plain_pytorch(found: dict[str, Any]) -> None:
    """At stage 3 its constructor failed on all ranks but the first."""
    divided, plain = found["classifier"][::2], found["classifier"][1::2]
    assert divided == pytest.approx(plain, abs=1e-6) and divided[0] > 1.01 * divided[1]


def test_trainer_at_stage_3_equals_ddp(found: dict[str, Any]) -> None:
    """With accumulation, and resumed. All cells and stages are test_clients.py's, by night."""
    compare(found["trainer"], "by day", 3)


def test_trainer_with_divided_sequences_equals_ddp(found: dict[str, Any]) -> None:
    """As accelerate drives Ulysses: ranks take turns with their batches, each loss is the mean over rows. The gradients are
    not twice what they should be, as they were in DeepSpeed at stages 1 and 2."""
    runs = found["trainer"]
    compare({**runs, "sequences by day, DDP": runs["by day, DDP"]}, "sequences by day", 1)


def test_ranks_are_known_before_there_is_an_engine(found: dict[str, Any]) -> None:
    assert found["ranks"] == [2, 1]


def test_two_configurations_are_one_too_many(found: dict[str, Any]) -> None:
    assert found["two"].startswith("ConfigError") and "other.json" in found["two"]


@pytest.mark.parametrize("stage", [1, 3])
def test_lightning_evaluates_as_ddp(found: dict[str, Any], stage: int) -> None:
    """Below stage 3 checkpoints were not found, and precisions had no effect; at stage 3 files of weights had none."""
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[clients]'")
    compare(found["lightning"], "evaluation", stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_lightning_keeps_the_engine_after_an_exception(found: dict[str, Any], stage: int) -> None:
    """It was gone, so that nothing could give the module back. With several ranks a script does it, on all of them."""
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[clients]'")
    compare(found["lightning"], "interrupted", stage)


@pytest.mark.nightly
def test_lightning_gives_the_module_of_one_rank_back_after_an_exception() -> None:
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[clients]'")
    alone = found_by("lightning", "interrupted", ranks=1)
    for stage in (0, 1, 3):
        compare(alone, "interrupted", stage)


def test_lightnings_callbacks_that_an_engine_cannot_have_are_refused(found: dict[str, Any]) -> None:
    """They ended in a KeyError of a page of numbers, and in torch's error about memory; averages work below stage 3."""
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[clients]'")
    averages = ("StochasticWeightAveraging", "EMAWeightAveraging")
    said = found["callbacks"]
    assert 'callbacks = "EMAWeightAveraging"' in said["by another name"]
    assert said["nulls"] == "torch.bfloat16 clips to 0.0"
    always = [f"{name}, {stage}" for name in ("BackboneFinetuning", "ModelPruning") for stage in (1, 3)]
    for callback in (*always, *(f"{name}, 3" for name in averages)):
        assert said[callback].startswith("ConfigError"), said[callback]
        assert f'callbacks = "{callback.partition(",")[0]}"' in said[callback] and "Remedy" in said[callback]
    assert [said[f"{name}, 1"] for name in averages] == ["torch.float32 clips to 0.0"] * 2


def test_lightning_is_told_that_a_step_ends_with_a_loss() -> None:
    """With several ranks it says so itself. With one, the update went to the step after, without a word."""
    pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[clients]'")
    from zerorun.integrations.lightning import EnginePrecision, ZerorunStrategy

    precision = EnginePrecision("32-true", ZerorunStrategy({}))
    with pytest.raises(StepError, match=r"training_step\(\) returned None.*Remedy"):
        precision.optimizer_step(None, SimpleNamespace(automatic_optimization=True), lambda: None)  # type: ignore[arg-type]
