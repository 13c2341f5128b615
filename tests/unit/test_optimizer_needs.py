"""What optimizers need of parameters: known by class, or found by a trial that changes nothing."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy
import own_optimizers
import pytest
import schedulefree
import torch
from covering import by_day

from zerorun.config.parse import load_config, resolve
from zerorun.errors import ConfigError, StepError
from zerorun.ops import single_pass
from zerorun.optim import optimizer_needs
from zerorun.optim.optimizer_needs import Needs, makes_states_in_step, try_needs
from zerorun.optim.optimizers import (
    BY_MATRICES,
    BY_SUMS,
    ELEMENTWISE,
    build_optimizer,
    needs_of,
    parts_kind,
    warn_of_kept_parameters,
    watched,
)

FOUND = {
    "Softsign": Needs.ELEMENTS,
    "AnyKeywords": Needs.ELEMENTS,
    "OfVectors": Needs.MATRICES,
    "OfLarge": Needs.MATRICES,
    "UnitRows": Needs.MATRICES,
    "Noisy": Needs.MATRICES,
    "OwnStates": Needs.MATRICES,
    "OneLength": Needs.MODEL,
    "ByPlace": Needs.MODEL,
    "DecaysMatrices": Needs.MATRICES,
    "AfterWarmUp": Needs.MATRICES,
    "Switched": Needs.ELEMENTS,
}


@pytest.mark.parametrize("name", FOUND)
def test_own_classes_are_tried(name: str) -> None:
    assert needs_of(None, f"own_optimizers.{name}", {"lr": 0.1}, [{}]) is FOUND[name]
    kind = getattr(own_optimizers, name)
    parameters = [torch.nn.Parameter(torch.ones(5, 3)), torch.nn.Parameter(torch.ones(5))]
    for rate in (0.0, torch.tensor(0.0)):
        client = kind([{"params": parameters[:1]}, {"params": parameters[1:], "momentum": 0.1}], lr=rate)
        assert needs_of(client, "", {}, client.param_groups) is FOUND[name], "a rate of 0 hides nothing"
        assert not client.state and all(torch.equal(param, torch.ones_like(param)) for param in parameters)
        assert [group["lr"] for group in client.param_groups] == [0.0, 0.0]


# What a class must be told. A trial sees that scales do not go by elements; that blocks are whole is the layout's matter.
SETTINGS: dict[type, dict[str, Any]] = {single_pass.Adam8bit: {"min_8bit_size": 1 << 20}, single_pass.Sophia: {"bs": 1.0}}


TABLE = sorted({*ELEMENTWISE, *BY_MATRICES}, key=lambda kind: kind.__name__)
BY_DAY = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, single_pass.Adam8bit)


@pytest.mark.parametrize("kind", by_day(TABLE, *(kind for kind in TABLE if kind in BY_DAY or kind in BY_MATRICES)))
def test_the_table_says_what_a_trial_finds(kind: type[torch.optim.Optimizer]) -> None:
    own = type("Own", (kind,), {})  # another class, which is not in the table
    client = own([torch.zeros(2, 2)], **SETTINGS.get(kind, {}))
    cannot_be_tried = kind is torch.optim.Adagrad and not makes_states_in_step(client)  # before torch 2.12
    expected = Needs.MATRICES if kind in BY_MATRICES or cannot_be_tried else Needs.ELEMENTS
    assert needs_of(client, "", {}, client.param_groups) is expected


@pytest.mark.parametrize("kind", sorted(BY_SUMS, key=lambda kind: kind.__name__))
def test_sums_go_by_exact_class(kind: type[torch.optim.Optimizer]) -> None:
    """A subclass of the user's may look at more than its parts, unless it says that it does not."""
    client = kind([torch.zeros(2, 2)])
    assert needs_of(client, "", {}, client.param_groups) is Needs.SUMS
    assert parts_kind(client, "", {}, Needs.SUMS) is kind
    assert needs_of(None, kind.__name__, {}, [{}]) is Needs.SUMS
    for attributes, wanted in (({}, Needs.MATRICES), ({"by_sums": True}, Needs.SUMS)):
        own = type("Own", (kind,), attributes)([torch.zeros(2, 2)])
        assert needs_of(own, "", {}, own.param_groups) is wanted
        assert (parts_kind(own, "", {}, wanted) is None) == (wanted is Needs.MATRICES)


def test_others() -> None:
    client = schedulefree.AdamWScheduleFree([torch.zeros(2, 2)], lr=0.1)
    client.train()
    assert needs_of(client, "", {}, client.param_groups) is Needs.ELEMENTS

    class Raises(own_optimizers.Own):
        pass

    client = Raises([torch.zeros(2, 2)])
    assert needs_of(client, "", {}, client.param_groups) is Needs.MATRICES

    class Says(own_optimizers.UnitRows):
        elementwise = True

    client = Says([torch.zeros(2, 2)])
    assert needs_of(client, "", {}, client.param_groups) is Needs.ELEMENTS


def test_what_no_trial_shows_can_be_said() -> None:
    class SaysNo(own_optimizers.Softsign):
        elementwise = False

    class Inherits(SaysNo):
        pass

    said: Any = torch.optim.SGD([torch.zeros(2, 2)], lr=0.1)
    said.elementwise = False
    for client in (SaysNo([torch.zeros(2, 2)]), Inherits([torch.zeros(2, 2)]), said):
        assert needs_of(client, "", {}, client.param_groups) is Needs.MATRICES


def test_a_number_that_is_0_may_be_one_that_has_to_be() -> None:
    class Nth(own_optimizers.Softsign):
        def direction(self, param: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
            return super().direction(param, [velocity, velocity * 2][self.param_groups[0]["which"]])

    client = Nth([{"params": [torch.zeros(2, 2)], "which": 0}])
    assert needs_of(client, "", {}, client.param_groups) is Needs.ELEMENTS


def test_it_is_tried_again_where_a_script_switches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[int] = []

    def counted(*given: Any) -> Needs:
        trials.append(1)
        return try_needs(*given)

    monkeypatch.setattr(optimizer_needs, "try_needs", counted)
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    client = own_optimizers.Switched([{"params": [param], "weight_decay": 0.1, "betas": (0.9, 0.99)}])
    watch = watched(client, Needs.ELEMENTS)
    assert watch is not None and watched(torch.optim.SGD([param]), Needs.ELEMENTS) is None
    (group,) = client.param_groups
    for count in range(3):  # schedules, and what the optimizer counts by itself
        group.update(lr=0.1 * count, weight_decay=0.2 + count, betas=(0.9 - 0.1 * count, 0.99), initial_lr=0.1)
        watch.refuse_more()
        client.step()
        watch.stepped()
    assert not trials
    group["weight_decay"] = 0.0
    watch.refuse_more()
    group["by"] = "columns"
    watch.refuse_more()
    watch.refuse_more()
    assert len(trials) == 2
    group["by"] = "rows"
    with pytest.raises(StepError, match=r"'by' it looks at whole parameters.*elementwise = False"):
        watch.refuse_more()


def test_tables_by_parameter_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """In an engine it finds no parameter there, which was silent: it had the rate of those that are not in the table."""
    params = [torch.zeros(2), torch.zeros(2)]
    with caplog.at_level(logging.WARNING, "zerorun"):
        warn_of_kept_parameters(own_optimizers.Softsign(params))
        assert not caplog.records
        warn_of_kept_parameters(own_optimizers.Keyed(params, {params[1]: 0.5}))
        warn_of_kept_parameters(own_optimizers.Keyed(params, {id(params[1]): 0.25}, lr=0.1))  # type: ignore[dict-item]
    assert "optimizer Keyed keeps parameters, or their id(), in 'rates'" in caplog.text and "Remedy" in caplog.text


def test_a_trial_leaves_tensors_of_the_optimizer_alone() -> None:
    class Counts(own_optimizers.Softsign):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            self.param_groups[0]["weight_sum"].add_(1)
            random.random(), numpy.random.rand()  # some draw what they add by chance
            super().step()

    client: Any = Counts([torch.zeros(2, 2)])
    client.steps, client.param_groups[0]["weight_sum"] = torch.zeros(()), torch.zeros(())
    state, of_python, of_numpy = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()
    assert needs_of(client, "", {}, client.param_groups) is Needs.ELEMENTS
    assert client.steps == 0 and client.param_groups[0]["weight_sum"] == 0
    assert torch.equal(torch.random.get_rng_state(), state) and random.getstate() == of_python
    assert (numpy.random.get_state()[1] == of_numpy[1]).all() and numpy.random.get_state()[2] == of_numpy[2]


def test_classes_by_name() -> None:
    made = build_optimizer("own_optimizers.Softsign", {"lr": 0.5}, [{"params": [torch.zeros(2)]}])
    assert type(made) is own_optimizers.Softsign and made.param_groups[0]["lr"] == 0.5
    assert type(build_optimizer("own_optimizers.AnyKeywords", {"momentum": 0.5}, [{"params": [torch.zeros(2)]}])).__name__
    adam = build_optimizer("zerorun.ops.single_pass.Adam", {}, [{"params": [torch.zeros(2)]}])
    assert type(adam) is single_pass.Adam


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("own_optimizers.Sofsign", {}, "cannot be imported: AttributeError"),
        ("no_such_package.Softsign", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("own_optimizers.not_an_optimizer", {}, "not a subclass of torch.optim.Optimizer"),
        ("own_optimizers.Softsign", {"beta": 1}, "Softsign has no such parameter. Remedy: Allowed: lr, momentum"),
        ("own_optimizers.AnyKeywords", {"beta": 1}, "AnyKeywords refused it: "),
    ],
)
def test_names_of_nothing(name: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(name, params, [{"params": [torch.zeros(2)]}])
    assert words in str(caught.value) and "optimizer." in str(caught.value)


def test_a_file_may_name_a_class_of_the_user_s() -> None:
    """It is imported by whoever trains, and not by whoever reads the file."""
    section = {"type": "no_such_package.Mine", "params": {"lr": "auto", "depth": 3}}
    config = load_config({"train_micro_batch_size_per_gpu": 1, "optimizer": section})
    assert config.optimizer is not None and config.optimizer.params == {"depth": 3}
    decided = resolve(config, data_parallel_size=1, learning_rate=0.5)
    assert decided.optimizer is not None and decided.optimizer.params == {"depth": 3, "lr": 0.5}
    with pytest.raises(ConfigError, match=r"or a class of your own by package\.Class"):
        load_config({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Mine"}})
