"""The DeepSpeed mode: what ``import deepspeed`` gives, when, and what it says of what is not there."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import process_of_tests
import pytest
import torch
from harness import patience, start_ranks, start_script

from zerorun.config.deepspeed_leniency import as_deepspeed_reads
from zerorun.deepspeed import activation
from zerorun.deepspeed.helpers import clone_tensors_for_torch_save, move_to_device
from zerorun.deepspeed.name_table import MISSING, SURFACE, missing_reason, target_of

BEGIN = "import zerorun.deepspeed; zerorun.deepspeed.activate()\n"


def run(text: str, folder: Path, *, fresh: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, in an empty folder; ``fresh``: in which nothing has been imported."""
    if not fresh:
        begin = f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, '')\n"  # as ``-c`` does
        script = start_script(begin + text, **variables)
        return subprocess.CompletedProcess([], *script.finish(60 * patience()))
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", text]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60 * patience(), check=False
    )


def printed(text: str, folder: Path, *, fresh: bool = False, **variables: str) -> list[str]:
    done = run(text, folder, fresh=fresh, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_name_leads_somewhere() -> None:
    """What is not there is not in the table either."""
    for module, names in SURFACE.items():
        for name in names:
            assert target_of(module, name) is not None, f"{module}.{name}"


def test_every_module_is_in_a_module() -> None:
    assert {name.rpartition(".")[0] for name in SURFACE} <= {*SURFACE, ""}


def test_tests_can_begin_it_where_there_is_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported for all of them had imported accelerate, and README's test command failed 32 times."""
    imported: list[str] = []
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib, "import_module", imported.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find_spec(name))
    process_of_tests.prepare()
    assert "torch" in imported and not {name.split(".")[0] for name in imported} & {"accelerate", "peft", "transformers"}


def test_it_is_deepspeed(tmp_path: Path) -> None:
    """By name, by version, by metadata, and in submodules; a name is one object wherever it is."""
    text = (
        BEGIN
        + """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
print(importlib.metadata.version("deepspeed"))
import deepspeed
from deepspeed import DeepSpeedEngine, comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.ops.adam import FusedAdam
import zerorun
print(deepspeed.__version__, DeepSpeedEngine is zerorun.Engine, deepspeed.zero.Init is zerorun.zero.Init)
print(comm is deepspeed.comm, deepspeed.zero.ZeroParamStatus is ZeroParamStatus, "initialize" in dir(deepspeed))
"""
    )
    assert printed(text, tmp_path) == ["0.19.8", "0.19.8 True True", "True True True"]


HAS_NCCL = "import torch.distributed as d; d.is_nccl_available = lambda: True\n"  # but no GPU, as most laptops


@pytest.mark.parametrize("begin", [BEGIN, BEGIN + HAS_NCCL], ids=["", "has NCCL"])
def test_ranks_meet_where_the_script_says(tmp_path: Path, begin: str) -> None:
    given = f'init_method="file://{tmp_path}/meet", rank=0, world_size=1'
    text = begin + f"import deepspeed\ndeepspeed.init_distributed({given})\nprint(deepspeed.comm.get_world_size())"
    assert printed(text, tmp_path) == ["1"]


def test_rank_zero_says_it_once(tmp_path: Path) -> None:
    text = BEGIN + "import deepspeed, deepspeed.comm"
    for rank, times in (("0", 1), ("1", 0)):
        assert run(text, tmp_path, RANK=rank).stderr.count("deepspeed is zerorun in this process") == times


def test_each_engine_is_in_the_log(tmp_path: Path) -> None:
    """Trainer's tests look for DeepSpeed's words, and so do people."""
    text = """
import torch, deepspeed
settings = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}}
for _ in range(2):
    deepspeed.initialize(model=torch.nn.Linear(4, 3), config=settings)
"""
    assert run(BEGIN + text, tmp_path).stderr.count("DeepSpeed info: version=0.19.8, the names of zerorun") == 2


TELLS_LOCAL_RANK = """
import torch, deepspeed
from types import SimpleNamespace
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
for rank in (-1, 0):
    args = SimpleNamespace(local_rank=rank)
    deepspeed.initialize(args, torch.nn.Linear(4, 3), config=config)
    print(args.local_rank)
"""


def test_arguments_have_the_local_rank_after_initialize(tmp_path: Path) -> None:
    """As in DeepSpeed. A script that has gone by -1 until then is warned, if it is one of several ranks."""
    with start_ranks(2, BEGIN + TELLS_LOCAL_RANK) as scripts:
        found = [script.finish(120 * patience()) for script in scripts]
    assert [(code, said.split()) for code, said, _ in found] == [(0, ["0", "0"]), (0, ["1", "1"])], found
    assert [errors.count("args.local_rank was -1") for *_, errors in found] == [1, 0]


def test_without_the_mode_there_is_no_trace(tmp_path: Path) -> None:
    """``import deepspeed`` is what it was: the real one, or nothing."""
    text = """
import zerorun, sys, importlib.util
spec = importlib.util.find_spec("deepspeed")
print(spec is None or spec.origin != "zerorun", any("deepspeed" in name for name in sys.modules))
"""
    assert printed(text, tmp_path, fresh=True, ZERORUN_AS_DEEPSPEED="0") == ["True False"]


def test_the_environment_asks_for_it(tmp_path: Path) -> None:
    """An installation has a .pth file, which Python reads at start."""
    text = "import importlib.util; print(importlib.util.find_spec('deepspeed').origin)"
    assert printed(text, tmp_path, fresh=True, ZERORUN_AS_DEEPSPEED="1") == ["zerorun"]


@pytest.mark.parametrize("word", (None, "", "0", "false", "No", " OFF", "1", "true", "on"))
def test_words_that_do_not_ask_for_it(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the .pth file, which says so without zerorun, and to what it calls."""
    asks, calls = word in ("1", "true", "on"), list[str]()
    monkeypatch.setattr(activation, "activate", lambda: calls.append("activate"))
    if word is None:
        monkeypatch.delenv(activation.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(activation.VARIABLE, word)
    activation.activate_if_asked()
    assert calls == ["activate"] * asks

    def importing(name: str, *rest: Any) -> Any:
        calls.append(name)
        return __import__(name, *rest)

    line = Path(activation.__file__).with_name("zerorun-as-deepspeed.pth").read_text()
    calls.clear()
    exec(line, {"__builtins__": {"__import__": importing}})
    assert calls == ["os", *["zerorun.deepspeed.activation", "activate"] * asks]


def test_whether_disks_can_be_offloaded_to(tmp_path: Path) -> None:
    """As clients ask before they offer it."""
    text = "import deepspeed; from deepspeed.ops.aio import AsyncIOBuilder as disks; "
    text += "print(deepspeed.ops.__compatible_ops__[disks.NAME], hasattr(deepspeed, '__path_of_nothing__'))"
    assert printed(BEGIN + text, tmp_path) == ["True False"]


MISSING_NAMES = {
    "from deepspeed.moe.layer import MoE": ("ImportError", "deepspeed.moe.layer is not in zerorun"),
    "import deepspeed.inference": ("ImportError", "engine.export()"),
    "from deepspeed.utils import nothing_like_it": ("ImportError", "deepspeed.utils.nothing_like_it is not in zerorun"),
    "import deepspeed; deepspeed.init_inference()": ("AttributeError", "engine.export()"),
    "from deepspeed.ops.op_builder import OpBuilder": ("ImportError", "deepspeed.ops.op_builder is not in zerorun"),
}


def test_what_is_missing_is_named_with_a_remedy(tmp_path: Path) -> None:
    """And a client that asks whether a name is there is told that it is not."""
    text = f"""
for statement in {list(MISSING_NAMES)}:
    try:
        exec(statement)
    except Exception as error:
        print(type(error).__name__, error)
import deepspeed
print(hasattr(deepspeed, "linear"), hasattr(deepspeed, "zero"))
"""
    *said, there = printed(BEGIN + text, tmp_path)
    for line, (kind, words) in zip(said, MISSING_NAMES.values(), strict=True):
        assert line.startswith(kind) and words in line and "Remedy: " in line
    assert there == "False True"


def test_groups_of_experts_stay_as_they_are(tmp_path: Path) -> None:
    """Each rank has all experts; a parameter that says that others do not have it is refused."""
    text = """
import torch
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer as split
param = torch.nn.Parameter(torch.zeros(2))
print(split({"params": [param], "name": "all"}) == [{"params": [param], "name": "all"}], is_moe_param(param))
param.allreduce = False
try:
    split([{"params": [param]}])
except Exception as error:
    print(error)
"""
    same, *error = printed(BEGIN + text, tmp_path)
    assert same == "True False" and "Remedy: Let each rank build all experts" in "".join(error)


@pytest.mark.parametrize("name", MISSING)
def test_a_reason_says_what_to_do(name: str) -> None:
    assert missing_reason(name).startswith(f"{name} is not in zerorun") and len(missing_reason(f"{name}.more")) > 100


def test_a_process_that_has_the_real_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("")
    done = run("import deepspeed\n" + BEGIN, tmp_path)
    assert "ActivationError" in done.stderr and "before anything imports deepspeed" in done.stderr


def test_accelerate_that_has_found_none_is_refused(tmp_path: Path) -> None:
    """It would not look again, and fail later with a name that is not defined."""
    hidden = "import sys, importlib.util as u; real = u.find_spec\n"
    hidden += "u.find_spec = lambda name, package=None: None if name == 'deepspeed' else real(name, package)\n"
    done = run(hidden + "import accelerate\n" + BEGIN, tmp_path, fresh=True)
    assert "ActivationError" in done.stderr and "accelerate has been imported" in done.stderr


def test_it_costs_little(tmp_path: Path) -> None:
    """What a process loads for the mode, beside torch and the engine, which it needs anyway."""
    base = "import zerorun.engine.initialize, zerorun.zero.gradients, zerorun.zero.init, zerorun.zero.value_access\n"
    base += "import psutil, sys\n"
    base += "before = set(sys.modules)\n"
    more = "import deepspeed; deepspeed.initialize; print(*sorted(set(sys.modules) - before))"
    loaded = printed(base + BEGIN + more, tmp_path, fresh=True)[-1].split()
    assert all(name.split(".")[0] in ("deepspeed", "zerorun") or "importlib" in name for name in loaded), loaded


@pytest.mark.parametrize("module", ("deepspeed.activation", "deepspeed.name_table"))
def test_what_runs_at_each_start_needs_no_torch(tmp_path: Path, module: str) -> None:
    text = f"import sys, zerorun.{module}; print('torch' in sys.modules)"
    assert printed(text, tmp_path, fresh=True) == ["False"]


def test_the_loss_scale_by_deepspeeds_names(tmp_path: Path) -> None:
    """The optimizer of an engine has it, with the outcome of the last step; others do not, and may name their own."""
    text = """
import torch, deepspeed
class Own(torch.optim.SGD):
    loss_scale = 3.0
model = torch.nn.Linear(2, 2)
settings = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}, "torch_adam": True},
            "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
engine, optimizer, *_ = deepspeed.initialize(model=model, config=settings)
scaler = optimizer.loss_scaler
print(optimizer.cur_scale, optimizer.dynamic_loss_scale, scaler.cur_iter, scaler.scale_window,
      optimizer.loss_scale_config.min_loss_scale)
engine.backward(engine(torch.full((1, 2), 6e4)).sum() * 6e4)
engine.step()
print(optimizer.loss_scale, scaler.cur_scale, scaler.cur_iter, engine.skipped_steps)
other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
print(hasattr(other, "loss_scale"), hasattr(other, "parameter_offload"), Own(other.param_groups, lr=0.1).loss_scale)
print(len(optimizer.parameter_offload.forward_hooks))
"""
    assert printed(BEGIN + text, tmp_path) == ["16.0 True 0 1000 1.0", "8.0 8.0 1 1", "False False 3.0", "0"]


def test_transformers_keeps_arange_as_it_is(tmp_path: Path) -> None:
    """From 5.23 on it replaces a function of theirs around zero.Init, and puts it back."""
    text = """
from deepspeed.runtime.zero import partition_parameters as pp
before = pp.zero_wrapper_for_fp_tensor_constructor
pp.zero_wrapper_for_fp_tensor_constructor = None
pp.zero_wrapper_for_fp_tensor_constructor = before
import torch
print(before(torch.arange, None, None) is torch.arange)
"""
    assert printed(BEGIN + text, tmp_path) == ["True"]


def test_a_configuration_by_deepspeeds_class(tmp_path: Path) -> None:
    text = """
import deepspeed
from deepspeed.runtime.lr_schedules import CYCLE_MIN_LR, WARMUP_LOG_RATE, WARMUP_MIN_RATIO
config = deepspeed.DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2, "sheduler": 1,
                                     "fp16": {"enabled": 1}, "zero_optimization": {"overlap_comm": 0, "stage": 1}})
import torch, zerorun
from zerorun.optim.lr_schedules import WarmupDecayLR, LRSchedule
made = LRSchedule(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1), WarmupDecayLR(total_num_steps=2000))
schedules = deepspeed.runtime.lr_schedules
print(isinstance(made, schedules.WarmupLR), isinstance(made, schedules.OneCycle), isinstance(1, schedules.WarmupLR))
cycle = schedules.OneCycle(made.optimizer, 0.1, [0.2], cycle_min_mom=[0.5], cycle_second_step_size=None)
print(cycle.formula.cycle_max_lr, cycle.formula.cycle_min_mom, cycle.formula.cycle_max_mom)
try:
    schedules.WarmupDecayLR(made.optimizer, warmup_min_lr="auto", warmup_stps=1)
except zerorun.ConfigError as error:
    print(sorted(problem.key.removeprefix("scheduler.params.") for problem in error.problems))
print(zerorun.Engine.coalesce_grad_reduction is zerorun.Engine.no_sync)
deepspeed.utils.set_log_level_from_string("warning")
print(deepspeed.utils.logger.level, deepspeed.logger is deepspeed.utils.logger, zerorun.log.logger.level)
print(config.fp16.enabled, config.zero_optimization.overlap_comm, config.zero_optimization.stage)
print(config.train_micro_batch_size_per_gpu, CYCLE_MIN_LR, WARMUP_LOG_RATE, WARMUP_MIN_RATIO)
try:
    deepspeed.init_distributed(dist_init_required=False)
except Exception as error:
    print(type(error).__name__, "it has not" in str(error))
deepspeed.checkpointing.configure(None, {"zero_optimization.reduce_bucket_size": 5})
print(deepspeed.checkpointing.is_configured())
"""
    assert printed(BEGIN + text, tmp_path, WORLD_SIZE="4") == [
        "True False False", "(0.2,) (0.5,) 0.9", "['total_num_steps', 'warmup_min_lr', 'warmup_stps']",
        "True", "30 True 20", "True False 1", "1 cycle_min_lr log warmup_min_ratio", "TopologyError True", "True"
    ]  # fmt: skip


def test_merged_weights_have_all_names_of_a_tied_parameter(tmp_path: Path) -> None:
    """So they load strictly. A file of safetensors has it once, as that of any model."""
    text = """
import torch, deepspeed
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
def tied():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model
model = tied()
settings = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}}
deepspeed.initialize(model=model, config=settings)[0].save_checkpoint("saved")
weights = get_fp32_state_dict_from_zero_checkpoint("saved")
print(tied().load_state_dict(weights, strict=True), weights["0.weight"] is weights["1.weight"])
for safe in (False, True):
    convert("saved", "out", safe_serialization=safe)
loaded = torch.load("out/pytorch_model.bin")
print(loaded["0.weight"] is loaded["1.weight"], torch.equal(loaded["1.weight"], model[1].weight))
from safetensors.torch import load_file
print(sorted(load_file("out/model.safetensors")))
"""
    names = "['0.bias', '0.weight', '1.bias']"
    assert printed(BEGIN + text, tmp_path) == ["<All keys matched successfully> True", "True True", names]


def test_a_save_leaves_the_script_that_merges(tmp_path: Path) -> None:
    """DeepSpeed does, and what people have written down is to run it, in the folder of the checkpoint."""
    text = """
import contextlib, io, subprocess, torch, deepspeed
model = torch.nn.Linear(2, 2)
settings = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}, "bf16": {"enabled": True}}
engine, *_ = deepspeed.initialize(model=model, config=settings)
for step in range(2):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.save_checkpoint("saved")
print(subprocess.run(["./zero_to_fp32.py", ".", "out"], cwd="saved").returncode)
found = torch.load("saved/out/pytorch_model.bin")
print(found["weight"].dtype, torch.equal(found["weight"].bfloat16(), model.weight.bfloat16()))
from zerorun.deepspeed.zero_to_fp32 import main  # as the script does, without a process for each
print(main(["saved", "saved/safe", "--safe_serialization", "-t", "global_step1"]))
with contextlib.redirect_stderr(io.StringIO()) as told:
    code = main(["nowhere", "out"])
print(code, told.getvalue().startswith("zero_to_fp32.py: error: "), "Traceback" in told.getvalue())
"""
    told = ["0", "torch.float32 True", "0", "1 True False"]
    assert printed(BEGIN + text, tmp_path) == told
    assert (tmp_path / "saved" / "safe" / "model.safetensors").exists()


def test_parameters_at_stage_3_on_one_rank(tmp_path: Path) -> None:
    """They are whole all the time. Scripts ask for their shapes by the stage, and not by the number of ranks."""
    text = """
import torch, deepspeed
settings = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}}
for stage in (2, 3):
    model = torch.nn.Linear(4, 3)
    engine, *_ = deepspeed.initialize(model=model, config={**settings, "zero_optimization": {"stage": stage}})
    print(hasattr(model.weight, "ds_id"))
weight = model.weight
print(tuple(weight.ds_shape), weight.ds_numel, weight.ds_status.name, weight.ds_persist)
print(torch.equal(weight.ds_tensor, weight.flatten()), model.state_dict()["weight"].sum() == weight.sum())
print(engine.optimizer.needs_scaler())
"""
    told = ["False", "True", "(3, 4) 12 AVAILABLE True", "True tensor(True)", "False"]
    assert printed(BEGIN + text, tmp_path) == told


def test_auto_switches_of_precision_are_off(tmp_path: Path) -> None:
    """DeepSpeed reads over "auto". It became bf16 in a script that no trainer filled the file in for."""
    text = """
import torch, deepspeed
auto = {"enabled": "auto"}
for precision in ({"bf16": auto}, {"fp16": {**auto, "loss_scale": 0}, "bfloat16": {"enabled": True}}):
    model = torch.nn.Linear(4, 3)
    settings = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}, **precision}
    deepspeed.initialize(model=model, config=settings)
    print(model.weight.dtype, deepspeed.DeepSpeedConfig(settings).bf16.enabled)
"""
    done = run(BEGIN + text, tmp_path)
    assert done.stdout.splitlines() == ["torch.float32 False", "torch.bfloat16 True"], done.stderr
    assert done.stderr.count('"auto" in bf16.enabled is false, as in DeepSpeed') == 1


def test_words_in_quotes_are_what_pydantic_takes_them_for() -> None:
    """In the sections that DeepSpeed reads with it. Its other readers fail at them later, or take every word for true."""
    zero = {"stage": "2", "overlap_comm": "false", "reduce_bucket_size": "500", "stage3_max_live_parameters": "auto"}
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": "yes"}}
    source = {"zero_optimization": {**zero, **offload}, "fp16": {"enabled": "true", "loss_scale": "128"}}
    told = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 500, "stage3_max_live_parameters": "auto"}
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert as_deepspeed_reads(source) == {
        "zero_optimization": {**told, **offloaded},
        "fp16": {"enabled": True, "loss_scale": 128.0},
    }
    for same in (
        {"zero_optimization": {"stage": "FULL_SHARD", "reduce_bucket_size": "5e8"}, "fp16": {"enabled": "perhaps"}},
        {"train_batch_size": "8", "wall_clock_breakdown": "false", "gradient_clipping": "1.0", "steps_per_print": 0},
        {"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}, "activation_checkpointing": {"profile": "false"}},
    ):
        assert as_deepspeed_reads(same) is same


def test_updates_of_muon_are_as_large_as_in_deepspeed(tmp_path: Path) -> None:
    """Its learning rates are those of Keller Jordan's Muon, torch's "original". Updates were 1.6 times as large here."""
    text = """
import copy, torch, deepspeed
from torch import nn
torch.manual_seed(0)
def moved(**params):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(3)))
    inputs, before = torch.randn(4, 64), copy.deepcopy(model)
    settings = {"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"weight_decay": 0.0, **params}}}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.backward(engine(inputs).square().mean())
    engine.step()
    plain = torch.optim.Muon([before[0][0].weight], lr=0.02, weight_decay=0.0, adjust_lr_fn="original")
    began = before[0][0].weight.detach().clone()
    before(inputs).square().mean().backward()
    plain.step()
    wanted = before[0][0].weight - began
    return ((model[0][0].weight - began).norm() / wanted.norm()).item()
print(*(f"{moved(**params):.1f}" for params in ({"lr": 0.02}, {}, {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"})))
"""
    done = run(BEGIN + text, tmp_path)
    assert done.stdout.split() == ["1.0", "1.0", "1.6"], done.stderr
    assert "Muon has adjust_lr_fn = original in optimizer.params, as in DeepSpeed" in done.stderr


def test_what_muon_does_where_a_file_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """And gradient_clipping, which means something else there, is told of: nobody can clip directions here."""
    deepspeeds = {"muon_lr": 0.02, "adam_lr": 3e-4, "adjust_lr_fn": "original"}
    for given, missing in (
        ({}, deepspeeds),
        ({"lr": "auto"}, {"adjust_lr_fn": "original"}),
        ({"adam_lr": 1e-4}, {"muon_lr": 0.02, "adjust_lr_fn": "original"}),
    ):
        read = as_deepspeed_reads({"optimizer": {"type": "muon", "params": given}})
        assert read["optimizer"] == {"type": "muon", "params": {**given, **missing}}
    whole = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    same = {"optimizer": {"type": "Muon", "params": whole}, "gradient_clipping": 0.75}
    with caplog.at_level("INFO", logger="zerorun"):
        assert as_deepspeed_reads(same) is same
    assert "gradient_clipping is 0.75 with Muon" in caplog.text


def test_what_scripts_ask_of_an_engine(tmp_path: Path) -> None:
    """Names, and ``to``, which returned the model without its engine. What is not there is in neither of the two."""
    text = """
import torch, deepspeed
model = torch.nn.Linear(4, 3)
model.bias.requires_grad_(False)
settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}, "disable_python_gc": True,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "zero_optimization": {"stage": 2, "zero_hpz_partition_size": 0, "compute_grad_norm": False}}
engine, *_ = deepspeed.initialize(model=model, config=settings)
print(engine.optimizer_name(), engine.scheduler_name(), engine.dynamic_loss_scale(), engine.get_data_parallel_rank())
print(list(engine.module_state_dict(exclude_frozen_parameters=True)), list(engine.module_state_dict(prefix="a.")))
moved = [engine.to("cpu"), engine.to(torch.device("cpu"), torch.float32), engine.to(torch.ones(1))]
print([one is engine for one in moved], engine.collect_python_gc() >= 0, engine.config.disable_python_gc)
for action in (lambda: engine.to("meta"), lambda: engine.to(torch.float16), lambda: engine.nothing_like_it,
               lambda: deepspeed.zero.Init(param_swapper=object())):
    try:
        action()
    except Exception as error:
        print(type(error).__name__, error)
model = torch.nn.Linear(4, 3)
own = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=own,
                                   config={"train_batch_size": 1, "optimizer": settings["optimizer"]})
print(engine.optimizer_name(), engine.scheduler_name())
"""
    *found, to, dtype, lacks, swapper, names = printed(BEGIN + text, tmp_path, ZERORUN_DEVICE="cpu")
    assert found == ["adamw WarmupLR True 0", "['weight'] ['a.weight', 'a.bias']", "[True, True, True] True True"]
    assert "engine.to('meta'): the engine is on cpu" in to and "the engine trains in torch.float32" in dtype
    assert lacks.startswith("AttributeError neither zerorun's engine nor the model, a Linear, has an attribute 'nothing_")
    assert swapper.startswith("ModelError zero.Init(param_swapper=object)") and names == "SGD None"


def test_what_an_engine_knows_of_its_file(tmp_path: Path) -> None:
    """Questions without a collective. What zerorun does not do is no attribute, and the error has the reason."""
    text = """
import torch, deepspeed
settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "dataloader_drop_last": True,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, "communication_data_type": "bf16",
            "flops_profiler": {"profile_step": 7}, "checkpoint": {"load_universal": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": False}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 3), config=settings)
print(engine.optimizer_params(), engine.scheduler_params(), engine.dataloader_drop_last(), engine.dump_state())
print(engine.torch_autocast_enabled(), engine.torch_autocast_dtype(), engine.communication_data_type)
print(engine.zero_offload_param(), engine.zero_offload_optimizer().device, engine.zero_cpu_offload(),
      engine.zero_use_cpu_optimizer(), engine.zero_nvme_offload_optimizer(), engine.zero_overlap_comm())
print(engine.load_universal_checkpoint(), engine.flops_profiler_profile_step(), engine.memory_breakdown())
print(engine.get_model_parallel_rank(), engine.get_tensor_parallel_rank(), engine.get_sequence_parallel_group().size())
plain, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 3), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                                 config={"train_batch_size": 1, "torch_autocast": {"enabled": True, "dtype": "fp16"}})
print(plain.optimizer_params(), plain.scheduler_params(), plain.torch_autocast_enabled(), plain.torch_autocast_dtype())
print(plain.zero_cpu_offload(), plain.zero_use_cpu_optimizer(), hasattr(plain, "clip_fp32_gradients"), plain.in_features)
try:
    plain.clip_fp32_gradients()
except AttributeError as error:
    print(error)
"""
    *found, lacks = printed(BEGIN + text, tmp_path, ZERORUN_DEVICE="cpu")
    assert found == [
        "{'lr': 0.5} {'warmup_num_steps': 5} True False",
        "False torch.bfloat16 torch.bfloat16",
        "None cpu True True False False",
        "True 7 False",
        "0 0 1",
        "None None True torch.float16",
        "False False False 4",
    ]
    assert (
        lacks.startswith("deepspeed.DeepSpeedEngine.clip_fp32_gradients is not in zerorun, which") and "Remedy: " in lacks
    )


ORDERS = {
    "deepspeed.initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params",
    "deepspeed.init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method "
    "dist_init_required config rank world_size",
    "deepspeed.add_config_arguments": "parser",
    "deepspeed.tp_model_init": "model tp_size dtype config",
    "deepspeed.zero.Init": "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path "
    "config enabled dtype mpu zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
    "sequence_data_parallel_group param_swapper",
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters": "params modifier_rank fwd_module enabled",
    "deepspeed.checkpointing.configure": "mpu_ deepspeed_config partition_activations contiguous_checkpointing "
    "num_checkpoints checkpoint_in_cpu synchronize profile",
    "deepspeed.comm.all_gather": "tensor_list tensor group async_op",
    "deepspeed.comm.all_reduce": "tensor op group async_op",
    "deepspeed.comm.barrier": "group async_op device_ids",
    "deepspeed.comm.broadcast": "tensor src group async_op",
    "deepspeed.comm.reduce": "tensor dst op group async_op",
    "deepspeed.comm.send": "tensor dst group tag",
    "deepspeed.ops.adam.DeepSpeedCPUAdam": "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode "
    "fp32_optimizer_states",
    "deepspeed.ops.adam.FusedAdam": "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
    "deepspeed.ops.lion.DeepSpeedCPULion": "model_params lr betas weight_decay fp32_optimizer_states",
    "deepspeed.ops.lion.FusedLion": "params lr betas weight_decay set_grad_none",
    "deepspeed.utils.log_dist": "message ranks level",
    "deepspeed.DeepSpeedEngine.backward": "self loss retain_graph scale_wrt_gas",
    "deepspeed.DeepSpeedEngine.compile": "self backend compile_kwargs schedule compiled_autograd_enabled",
    "deepspeed.DeepSpeedEngine.load_checkpoint": "self load_dir tag load_module_strict load_optimizer_states "
    "load_lr_scheduler_states load_module_only custom_load_fn",
    "deepspeed.DeepSpeedEngine.load_module_state_dict": "self checkpoint strict custom_load_fn fetch_z3_params "
    "z3_params_to_fetch allowed_missing_keys",
    "deepspeed.DeepSpeedEngine.module_state_dict": "self destination prefix keep_vars exclude_frozen_parameters",
    "deepspeed.DeepSpeedEngine.offload_states": "self include device pin_memory non_blocking",
    "deepspeed.DeepSpeedEngine.save_16bit_model": "self save_dir save_filename exclude_frozen_parameters",
    "deepspeed.DeepSpeedEngine.save_checkpoint": "self save_dir tag client_state save_latest exclude_frozen_parameters",
    "deepspeed.DeepSpeedEngine.set_gradient_accumulation_boundary": "self is_boundary",
    "deepspeed.DeepSpeedEngine.step": "self lr_kwargs",
    "deepspeed.DeepSpeedEngine.train": "self mode",
    "deepspeed.PipelineEngine.eval_batch": "self data_iter return_logits compute_loss reduce_output bcast_loss "
    "num_micro_batches",
    "deepspeed.PipelineEngine.train_batch": "self data_iter",
}
OTHER_NAMES = {"engine": "self", "dir": "save_dir"}  # what stands first, and is not named by those who call


def test_arguments_come_in_deepspeeds_order(tmp_path: Path) -> None:
    """Scripts leave out the names of the first ones. Where zerorun takes more, these come after DeepSpeed's."""
    text = f"""
import importlib, inspect
for path in {list(ORDERS)}:
    home, _, name = path.rpartition(".")
    above, _, owner = home.rpartition(".")
    found = importlib.import_module(above if owner.endswith("Engine") else home)
    found = getattr(getattr(found, owner) if owner.endswith("Engine") else found, name)
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    print(*(one.name for one in inspect.signature(found).parameters.values() if one.kind in kinds))
"""
    for line, (path, order) in zip(printed(BEGIN + text, tmp_path), ORDERS.items(), strict=True):
        found, wanted = [OTHER_NAMES.get(name, name) for name in line.split()], order.split()
        assert found[: len(wanted)] == wanted, path


def test_deepspeeds_arguments_without_their_names(tmp_path: Path) -> None:
    """Of methods that zerorun has, too. Nothing to load is (None, None), and {} where zerorun's own method is called."""
    text = """
import torch, deepspeed
from deepspeed.runtime.lr_schedules import WarmupLR
settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 3), config=settings)
loss = engine(torch.ones(1, 4)).sum()
engine.backward(loss, True)
engine.backward(loss, False, True)
engine.step()
print(engine.load_checkpoint("nothing", None), engine.resume("nothing"))
engine.save_checkpoint("saved", "a", {"epoch": 3})
kept = engine.state_dict()["weight"].clone()
with torch.no_grad():
    engine.module.load_state_dict({name: value + 1 for name, value in engine.module.state_dict().items()})
for given in (("a", True, True, True), ("a", False, False, False, True, None)):
    path, state = engine.load_checkpoint("saved", *given)
    print(path.name, state, torch.equal(engine.state_dict()["weight"], kept))
schedule = WarmupLR(engine.optimizer, 0.0, 1.0, 4, "linear", 1)
print(engine.load_checkpoint(dir="saved", strict=True, allow_missing=["x"])[1], schedule.get_last_lr())
for action in (lambda: engine.load_checkpoint("saved", custom_load_fn=print), lambda: engine.compile("eager", {}, []),
               lambda: engine.compile("eager", None, None, True)):
    try:
        action()
    except ValueError as error:
        print(type(error).__name__, *str(error).split())
"""
    nothing, *loaded, own, load, schedule, graph = printed(BEGIN + text, tmp_path, ZERORUN_DEVICE="cpu")
    assert nothing == "(None, None) (None, {})"
    assert loaded == ["a {'epoch': 3} True", "a {'epoch': 3} True"] and own == "{'epoch': 3} [0.25]"
    assert load.startswith("ConfigError engine.load_checkpoint(): 1 problem custom_load_fn = 'print': each rank reads")
    assert "schedule = []: zerorun gathers" in schedule and "compiled_autograd_enabled = True: backward runs" in graph


def test_a_load_leaves_the_scripts_generators_alone(tmp_path: Path) -> None:
    """As in DeepSpeed: Trainer chooses its data after the load with those of a fresh start, and loads its own ones then.
    A script that asks gets those of the checkpoint, as by zerorun's resume()."""
    text = """
import random
import numpy, torch, deepspeed
settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 3), config=settings)
def seed(number):
    torch.manual_seed(number), random.seed(number), numpy.random.seed(number)
def drawn():
    return torch.rand(1).item(), random.random(), numpy.random.rand()
def after(action):
    seed(1)
    action()
    return drawn()
seed(0)
engine.save_checkpoint("saved", "a")
saved, fresh = drawn(), after(lambda: None)
loads = (lambda: engine.load_checkpoint("saved"), lambda: engine.load_checkpoint("saved", "a", load_module_only=True),
         lambda: engine.load_checkpoint("saved", load_random_numbers=True), lambda: engine.resume("saved"))
print(*("fresh" if found == fresh else "saved" if found == saved else found for found in map(after, loads)))
"""
    assert printed(BEGIN + text, tmp_path) == ["fresh fresh saved saved"]


def test_what_scripts_ask_of_a_cpu(tmp_path: Path) -> None:
    text = """
import torch
from deepspeed.accelerator import get_accelerator
device, environment = get_accelerator(), {}
device.range_push("forward")
device.range_pop()
device.set_visible_devices_envs(environment, [0, 2])
print(device.lazy_call(lambda: 3), device.visible_devices_envs(), environment)
print(device.FloatTensor([1.0]).dtype, device.HalfTensor is torch.HalfTensor)
print(isinstance(torch.ones(1).long(), device.LongTensor), hasattr(device, "NoSuchTensor"))
"""
    told = ["3 ['CUDA_VISIBLE_DEVICES'] {'CUDA_VISIBLE_DEVICES': '0,2'}", "torch.float32 True", "True False"]
    assert printed(BEGIN + text, tmp_path, ZERORUN_DEVICE="cpu") == told


class Output(NamedTuple):
    loss: torch.Tensor
    logits: list[torch.Tensor]


def test_named_tuples_are_moved_and_copied_as_tuples() -> None:
    value = Output(torch.ones(2, requires_grad=True), [torch.zeros(3)])
    moved, cloned = move_to_device(value, "meta"), clone_tensors_for_torch_save(value)
    assert type(moved) is type(cloned) is tuple
    assert moved[0].is_meta and moved[1][0].is_meta
    assert torch.equal(cloned[0], value.loss) and not cloned[0].requires_grad
    assert cloned[1][0].data_ptr() != value.logits[0].data_ptr()


def test_copies_of_a_tied_weight_are_one() -> None:
    """Trainers wrote it twice below stage 3; parts of one memory and values of their own stay apart."""
    tied, both = torch.ones(2, 3), torch.arange(6.0)
    cloned = clone_tensors_for_torch_save(
        {"embed": tied, "head": tied.detach(), "low": both[:3], "whole": both, "t": tied.t()}
    )
    assert cloned["embed"] is cloned["head"] and cloned["embed"].data_ptr() != tied.data_ptr()
    assert [cloned["low"].tolist(), cloned["whole"].tolist()] == [[0.0, 1.0, 2.0], both.tolist()]
    assert cloned["low"].untyped_storage().nbytes() == 12 and cloned["t"].shape == (3, 2)


IN_A_MODULE = """
import copy, gc, pickle, weakref
import torch, deepspeed
from torch import nn

class Actor(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(3, 3)
    def forward(self, x):
        return self.head(self.model(x))

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))

settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "gradient_clipping": 0, "zero_optimization": {"stage": STAGE}}
engine, *_ = deepspeed.initialize(model=model(), config=settings)
actor, plain = Actor(engine), Actor(nn.ModuleDict({"module": model()}))
"""


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_an_engine_in_a_module_is_one_of_its_modules(tmp_path: Path, stage: int) -> None:
    """With the names that it has there in DeepSpeed. What is asked of the engine itself goes to the model as before."""
    text = """
for names in ("named_modules", "named_parameters", "named_buffers", "state_dict"):
    found, wanted = (list(getattr(one, names)()) for one in (actor, plain))
    if names != "state_dict":
        found, wanted = ([name for name, _ in pairs] for pairs in (found, wanted))
    print(found == wanted, end=" ")
print(isinstance(engine, nn.Module), isinstance(engine, deepspeed.DeepSpeedEngine), engine in list(actor.children()))
for name in ("named_modules", "named_parameters", "named_children", "named_buffers"):
    print([one for one, _ in getattr(engine, name)()] == [one for one, _ in getattr(engine.module, name)()], end=" ")
print(list(engine.state_dict())[:2], list(engine.state_dict(prefix="a."))[:2])
dropout, seen = engine.module[1], []
for action in (actor.eval, actor.train, engine.eval, engine.train, lambda: actor.train(False), engine.module.train):
    action()
    seen.append((dropout.training, engine.training))
print(*(int(one) if one == other else "?" for one, other in seen))
actor.apply(lambda one: seen.append(one))
print(dropout in seen, engine.apply(lambda one: None) is engine.module, actor.to("cpu") is actor)
print(engine.to("cpu") is engine, actor.requires_grad_() is actor, actor.load_state_dict(actor.state_dict()))
calls = []
handles = [engine.register_forward_hook(lambda *_: calls.append("after"))]
handles += [engine.register_forward_pre_hook(lambda *_: calls.append("before"))]
engine(torch.ones(2, 4))
[handle.remove() for handle in handles]
print(calls)
for action in (lambda: copy.deepcopy(engine), lambda: pickle.dumps(engine), lambda: copy.deepcopy(actor)):
    try:
        action()
    except Exception as error:
        print(type(error).__name__)
engine.backward(actor(torch.ones(2, 4)).sum())
engine.step()
actor.zero_grad()
engine.zero_grad()
print({param.grad for param in actor.parameters()}, "Linear" in repr(actor))
found = weakref.ref(engine)
engine.destroy()
del engine, actor, seen, action
gc.collect()
print(found())
"""
    assert printed(BEGIN + IN_A_MODULE.replace("STAGE", str(stage)) + text, tmp_path) == [
        "True True True True True True True",
        "True True True True ['0.weight', '0.bias'] ['a.module.0.weight', 'a.module.0.bias']",
        "0 1 0 1 0 1",
        "True True True",
        "True True <All keys matched successfully>",
        "['before', 'after']",
        *["StepError"] * 3,
        "{None} True",
        "None",
    ]


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_module_around_an_engine_trains_as_one_process(tmp_path: Path, stage: int) -> None:
    text = """
with torch.no_grad():
    plain.head.load_state_dict(actor.head.state_dict())
actor.requires_grad_(True).eval()
plain.eval()
optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1)
for _ in range(3):
    engine.backward(actor(torch.ones(2, 4)).sum())
    engine.step()
    plain.head(plain.model["module"](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = plain.model["module"].state_dict()
print(all(torch.allclose(value, weights[name]) for name, value in engine.state_dict().items()), len(weights))
"""
    assert printed(BEGIN + IN_A_MODULE.replace("STAGE", str(stage)) + text, tmp_path, ZERORUN_DEVICE="cpu") == ["True 7"]


def test_values_go_through_a_module_into_its_engine(tmp_path: Path) -> None:
    """By ``load_state_dict``, with the names that its ``state_dict`` has. A wrong name is told as by any module."""
    text = """
plain.load_state_dict({name: torch.full_like(value, 2) for name, value in plain.state_dict().items()})
print(actor.load_state_dict(plain.state_dict()), *{float(value.double().mean()) for value in engine.state_dict().values()})
try:
    actor.load_state_dict({**plain.state_dict(), "model.odd": torch.ones(1)})
except RuntimeError as error:
    print('Unexpected key(s) in state_dict: "model.odd".' in str(error))
"""
    found = printed(BEGIN + IN_A_MODULE.replace("STAGE", "2") + text, tmp_path, ZERORUN_DEVICE="cpu")
    assert found == ["<All keys matched successfully> 2.0", "True"]


def test_a_pipelines_engine_is_a_module_as_well(tmp_path: Path) -> None:
    text = """
import torch, deepspeed
from deepspeed.pipe import PipelineModule
layers = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)]
net = PipelineModule(layers, num_stages=1, loss_fn=lambda output, label: ((output - label) ** 2).mean())
settings = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=net, config=settings)
outer = torch.nn.ModuleList([engine])
print(isinstance(engine, deepspeed.PipelineEngine), isinstance(engine, torch.nn.Module))
outer.eval()
print(layers[1].training, len(list(outer.parameters())), engine.forward.__name__)
engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))]))
print(engine.global_steps)
"""
    found = printed(BEGIN + text, tmp_path, ZERORUN_DEVICE="cpu")
    assert found == ["True True", "False 2 __call__", "1"]


def test_what_scripts_ask_of_a_pipelines_engine(tmp_path: Path) -> None:
    """As gpt-neox does: its place, and one micro-batch in an evaluation, where a step has two. A step keeps its number."""
    text = """
import torch, deepspeed
from deepspeed.pipe import PipelineModule
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
net = PipelineModule(layers, num_stages=1, loss_fn=lambda output, label: ((output - label) ** 2).mean())
settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=net, config=settings)
print(engine.num_stages, engine.stage_id, engine.micro_batches, engine.micro_batch_size, engine.mp_world_size,
      engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel, engine.mpu is engine.grid)
grid = engine.grid
print(grid.stage_to_global(engine.num_stages - 1), grid.pipe_parallel_size, grid.pp_group, grid.get_data_parallel_rank())
engine.set_has_attention_mask(True)
print(engine.has_attention_mask, engine.reset_activation_shape(), hasattr(engine, "no_such_name"))
batches = [(torch.full((2, 4), float(n)), torch.ones(2, 4)) for n in range(2)]
def evaluated(*given, **named):
    loss, logits = engine.eval_batch(iter(given), return_logits=True, **named)
    with torch.no_grad():
        wanted = [layers[1](layers[0](inputs)) for inputs, _ in given]
        mean = sum(net.loss_fn(one, label) for one, (_, label) in zip(wanted, given)) / len(given)
    return torch.allclose(loss, mean) and torch.allclose(logits, wanted[-1])
both, before = evaluated(*batches), engine.micro_batches
engine.micro_batches = 1
print(both, evaluated(batches[1]), evaluated(*batches, num_micro_batches=2), engine.gradient_accumulation_steps())
for action in (lambda: engine.train_batch(iter(batches)), lambda: setattr(engine, "micro_batches", 0)):
    try:
        action()
    except Exception as error:
        print(type(error).__name__, error)
engine.micro_batches = before
engine.train_batch(iter(batches))
print(engine.global_steps, evaluated(*batches))
engine.set_train_batch_size(6)
print(engine.micro_batches)
"""
    *found, trained, none, steps, more = printed(BEGIN + text, tmp_path, ZERORUN_DEVICE="cpu")
    assert found == ["1 0 2 2 1 False False False True", "0 1 [0] 0", "True None False", "True True True 2"]
    assert trained.startswith("PipelineError engine.micro_batches = 1, and a step has 2 micro-batches: ")
    assert none.startswith("PipelineError engine.micro_batches = 0") and (steps, more) == ("1 True", "3")
