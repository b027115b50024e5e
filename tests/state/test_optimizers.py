# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another optimizer, or of other parameters, is refused before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="optimizers of torch")

from ckptmgr import CheckpointManager, Resume  # noqa: E402
from ckptmgr.state.optimizers import all_problems, check_same, class_of  # noqa: E402
from ckptmgr.state.paths import Path as StatePath  # noqa: E402
from ckptmgr.state.paths import StateMismatch  # noqa: E402

OPTIM = torch.optim
_Make = Callable[[Any], Any]


def trained(make: _Make, *, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return {"model": model, "optimizer": make(model)}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 4)).square().mean().backward()
    state["optimizer"].step()


def resume(directory: Path, saved: _Make, given: _Make) -> dict[str, Any]:
    """Save a step of one optimizer, and resume it with another."""
    with CheckpointManager(directory) as manager:
        state = trained(saved)
        step(state)
        manager.save(1, state)
    with CheckpointManager(directory) as manager:
        state = trained(given, seed=1)
        before = state["model"][0].weight.clone()
        try:
            manager.resume(state)
        except StateMismatch:
            assert torch.equal(state["model"][0].weight, before)
            raise
    step(state)
    return state


def adamw(model: Any) -> Any:
    return OPTIM.AdamW(model.parameters())


REFUSED: list[tuple[str, _Make, _Make, str]] = [
    ("another class", adamw, lambda m: OPTIM.SGD(m.parameters()), r"\['momentum'\] is not in.*SGD"),
    (
        "another class with fewer hyperparameters",
        lambda m: OPTIM.Adam(m.parameters()),
        lambda m: OPTIM.RAdam(m.parameters()),
        r"\['amsgrad'\] is only in the checkpoint, whose optimizer is another than RAdam",
    ),
    (
        "Adam for AdamW",
        lambda m: OPTIM.Adam(m.parameters()),
        adamw,
        r"\['decoupled_weight_decay'\] is True, stored is False: Adam and AdamW differ",
    ),
    (
        "more groups",
        adamw,
        lambda m: OPTIM.AdamW([{"params": m[0].parameters()}, {"params": m[1].parameters()}]),
        r"state\['optimizer'\].state_dict\(\)\['param_groups'\] has 2 groups, stored are 1",
    ),
    (
        "fewer parameters",
        adamw,
        lambda m: OPTIM.AdamW(m[0].parameters()),
        r"\['param_groups'\]\[0\]\['params'\] are 2, stored are 4",
    ),
    (
        "another order of the parameters",
        adamw,
        lambda m: OPTIM.AdamW(list(m.parameters())[::-1]),
        r"\['state'\]\[0\]\['exp_avg'\] is stored with shape \[4, 4\], its parameter has \[1\]",
    ),
]


@pytest.mark.parametrize(
    ("saved", "given", "message"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED]
)
def test_checkpoint_of_another_optimizer_is_refused_by_name(
    tmp_path: Path, saved: _Make, given: _Make, message: str
) -> None:
    with pytest.raises(StateMismatch, match=message):
        resume(tmp_path, saved, given)


def test_group_that_was_added_in_the_middle_is_added_before_the_resumption(tmp_path: Path) -> None:
    def with_late_group(model: Any) -> Any:
        optimizer = OPTIM.Adam(model[0].parameters())
        optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
        return optimizer

    with pytest.raises(StateMismatch, match="add those that the saved run has added, with add_par"):
        resume(tmp_path, with_late_group, lambda m: OPTIM.Adam(m[0].parameters()))
    state = resume(tmp_path, with_late_group, with_late_group)
    assert [group["lr"] for group in state["optimizer"].param_groups] == [0.001, 0.5]


def test_group_that_the_saved_run_had_not_added_yet_is_added_after_the_resumption(
    tmp_path: Path,
) -> None:
    def early(model: Any) -> Any:
        return OPTIM.Adam(model[0].parameters())

    def with_late_group(model: Any) -> Any:
        optimizer = early(model)
        optimizer.add_param_group({"params": model[1].parameters()})
        return optimizer

    with pytest.raises(StateMismatch, match="had not added yet after the resumption"):
        resume(tmp_path, early, with_late_group)
    state = resume(tmp_path, early, early)
    state["optimizer"].add_param_group({"params": state["model"][1].parameters()})
    step(state)


def test_hyperparameters_of_the_checkpoint_hold(tmp_path: Path) -> None:
    state = resume(tmp_path, adamw, lambda m: OPTIM.AdamW(m.parameters(), lr=0.5))
    assert state["optimizer"].param_groups[0]["lr"] == 0.001


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda one: OPTIM.lr_scheduler.LambdaLR(one, lambda step: 1.0),
    "StepLR": lambda one: OPTIM.lr_scheduler.StepLR(one, 3),
    "MultiStepLR": lambda one: OPTIM.lr_scheduler.MultiStepLR(one, [3]),
    "ConstantLR": lambda one: OPTIM.lr_scheduler.ConstantLR(one),
    "LinearLR": lambda one: OPTIM.lr_scheduler.LinearLR(one),
    "ExponentialLR": lambda one: OPTIM.lr_scheduler.ExponentialLR(one, 0.5),
    "PolynomialLR": lambda one: OPTIM.lr_scheduler.PolynomialLR(one),
    "CosineAnnealingLR": lambda one: OPTIM.lr_scheduler.CosineAnnealingLR(one, 9),
    "CosineAnnealingWarmRestarts": lambda one: OPTIM.lr_scheduler.CosineAnnealingWarmRestarts(
        one, 9
    ),
    "OneCycleLR": lambda one: OPTIM.lr_scheduler.OneCycleLR(one, 0.1, total_steps=9),
    "CyclicLR": lambda one: OPTIM.lr_scheduler.CyclicLR(one, 0.1, 0.2),
    "ReduceLROnPlateau": lambda one: OPTIM.lr_scheduler.ReduceLROnPlateau(one),
    "ChainedScheduler": lambda one: OPTIM.lr_scheduler.ChainedScheduler(
        [OPTIM.lr_scheduler.ConstantLR(one) for _ in range(2)], one
    ),
    "SequentialLR": lambda one: in_sequence(one, 2),
    "SequentialLR of three": lambda one: in_sequence(one, 3),
}


def in_sequence(optimizer: Any, parts: int) -> Any:
    made = [OPTIM.lr_scheduler.ConstantLR(optimizer) for _ in range(parts)]
    return OPTIM.lr_scheduler.SequentialLR(optimizer, made, list(range(2, parts + 1)))


def schedule(name: str) -> Any:
    sgd = OPTIM.SGD(trained(adamw)["model"].parameters(), momentum=0.9)
    return SCHEDULES[name](sgd)


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
def test_checkpoint_of_another_schedule_is_refused_by_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {name: schedule(name) for name in SCHEDULES})
        manager.resume({name: schedule(name) for name in SCHEDULES})
        for given in SCHEDULES:
            with pytest.raises(StateMismatch) as caught:
                manager.resume({saved: schedule(given) for saved in SCHEDULES})
            named = set(re.findall(r"state\['([^']*)'\].state_dict\(\)\['", str(caught.value)))
            assert named == SCHEDULES.keys() - {given}


def test_schedule_with_other_parts_is_refused_by_the_place_of_the_part(tmp_path: Path) -> None:
    def chained(last: str) -> Any:
        sgd = OPTIM.SGD(trained(adamw)["model"].parameters())
        return OPTIM.lr_scheduler.ChainedScheduler(
            [SCHEDULES[name](sgd) for name in ("StepLR", last)], sgd
        )

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"schedule": chained("LinearLR")})
        manager.resume({"schedule": chained("LinearLR")})
        message = r"\['_schedulers'\]\[1\]\['gamma'\] is not in .* than this ExponentialLR"
        with pytest.raises(StateMismatch, match=message):
            manager.resume({"schedule": chained("ExponentialLR")})


def test_schedule_of_a_program_is_not_compared(tmp_path: Path) -> None:
    class Own(OPTIM.lr_scheduler.StepLR):  # type: ignore[misc, name-defined]
        pass

    own = Own(OPTIM.SGD(trained(adamw)["model"].parameters()), 3)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"schedule": schedule("ConstantLR")})
        manager.resume({"schedule": own})


def test_schedule_of_a_program_in_a_sequence_is_not_compared(tmp_path: Path) -> None:
    class Own(OPTIM.lr_scheduler.StepLR):  # type: ignore[misc, name-defined]
        pass

    def sequence(*, has_power: bool) -> Any:
        sgd = OPTIM.SGD(trained(adamw)["model"].parameters())
        own: Any = Own(sgd, 3)
        if has_power:
            own.power = 2
        return OPTIM.lr_scheduler.SequentialLR(sgd, [SCHEDULES["LinearLR"](sgd), own], [2])

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"schedule": sequence(has_power=False)})
        assert manager.resume({"schedule": sequence(has_power=True)}).step == 1


def test_object_that_holds_a_schedule_of_torch_is_not_compared(tmp_path: Path) -> None:
    class Progress:
        def __init__(self) -> None:
            self.scheduler = schedule("StepLR")
            self.epoch = 0

        def state_dict(self) -> Any:
            return {"epoch": self.epoch, "rates": self.scheduler.state_dict()}

        def load_state_dict(self, state_dict: Any) -> None:
            self.epoch = state_dict["epoch"]
            self.scheduler.load_state_dict(state_dict["rates"])

    saved, resumed = Progress(), Progress()
    saved.epoch = 3
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"progress": saved})
        manager.resume({"progress": resumed})
    assert resumed.epoch == 3


def test_length_of_a_schedule_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    def scheduler(steps: int) -> Any:
        return OPTIM.lr_scheduler.CosineAnnealingLR(trained(adamw)["optimizer"], T_max=steps)

    resumed = scheduler(20)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"scheduler": scheduler(10)})
        manager.resume({"scheduler": resumed})
    assert resumed.T_max == 10


def test_weights_alone_begin_a_run_with_another_optimizer(tmp_path: Path) -> None:
    old, new = trained(adamw), trained(lambda m: OPTIM.SGD(m.parameters()), seed=1)
    step(old)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, old)
    with CheckpointManager(tmp_path) as manager:
        manager.load("latest", {"model": new["model"]}, only="model")
        assert manager.resume(new, Resume(start="new")).step == 0
        assert torch.equal(new["model"][0].weight, old["model"][0].weight)
        manager.save(1, new)
        assert manager.resume(new).step == 1


def test_checkpoint_of_an_older_torch_that_lacks_an_option_loads(tmp_path: Path) -> None:
    def older(model: Any) -> Any:
        optimizer = adamw(model)
        del optimizer.param_groups[0]["decoupled_weight_decay"]
        return optimizer

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, trained(older))
        manager.resume(trained(adamw))


def test_hyperparameters_that_a_scheduler_adds_are_taken(tmp_path: Path) -> None:
    def scheduled(model: Any) -> Any:
        optimizer = adamw(model)
        OPTIM.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        return optimizer

    state = resume(tmp_path, scheduled, adamw)
    assert state["optimizer"].param_groups[0]["max_lr"] == 0.1


def test_parameters_in_another_order_are_refused_by_their_names(tmp_path: Path) -> None:
    def ordered(*names: str) -> _Make:
        return lambda m: OPTIM.SGD([(name, m.get_parameter(name)) for name in names])

    resume(tmp_path, ordered("0.bias", "1.bias"), ordered("0.bias", "1.bias"))
    message = r"have 0.bias where 1.bias is stored\n.* have 1.bias where 0.bias is stored"
    with pytest.raises(StateMismatch, match=message):
        resume(tmp_path, ordered("0.bias", "1.bias"), ordered("1.bias", "0.bias"))


def test_optimizer_whose_hook_rewrites_the_stored_state_is_not_compared(tmp_path: Path) -> None:
    def in_two_groups(model: Any) -> Any:
        optimizer = OPTIM.AdamW([{"params": [one.weight]} for one in model])

        @optimizer.register_load_state_dict_pre_hook  # type: ignore[untyped-decorator, unused-ignore]
        def split(_: Any, stored: Any) -> Any:
            (group,) = stored["param_groups"]
            groups = [{**group, "params": [number]} for number in group["params"]]
            return {"state": stored["state"], "param_groups": groups}

        return optimizer

    def in_one_group(model: Any) -> Any:
        return OPTIM.AdamW([one.weight for one in model])

    state = resume(tmp_path, in_one_group, in_two_groups)
    steps = [one["step"].item() for one in state["optimizer"].state.values()]
    assert steps == [2, 2]


def test_wrapper_that_stores_a_form_of_its_own_is_not_compared(tmp_path: Path) -> None:
    class Lookahead(OPTIM.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step(closure)

        def state_dict(self) -> Any:
            fast = self.optimizer.state_dict()
            groups = fast["param_groups"]
            return {"fast_state": fast["state"], "slow_state": {}, "param_groups": groups}

        def load_state_dict(self, state_dict: Any) -> None:
            groups = state_dict["param_groups"]
            fast = {"state": state_dict["fast_state"], "param_groups": groups}
            self.optimizer.load_state_dict(fast)

    def lookahead(model: Any) -> Any:
        return Lookahead(adamw(model))

    inner = resume(tmp_path, lookahead, lookahead)["optimizer"].optimizer
    assert {one["step"].item() for one in inner.state.values()} == {2}


def test_decoupled_decay_of_nadam_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    def nadam(*, is_decoupled: bool) -> _Make:
        return lambda m: OPTIM.NAdam(m.parameters(), decoupled_weight_decay=is_decoupled)

    state = resume(tmp_path, nadam(is_decoupled=True), nadam(is_decoupled=False))
    assert state["optimizer"].param_groups[0]["decoupled_weight_decay"] is True


def test_optimizer_that_loads_its_state_itself_is_compared_after_the_load(tmp_path: Path) -> None:
    class Own(OPTIM.SGD):  # type: ignore[misc, name-defined]
        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = len(state_dict["param_groups"])

    state = trained(adamw)
    step(state)
    own = Own(state["model"].parameters())
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"optimizer": state["optimizer"]})
        with pytest.raises(StateMismatch, match="is stored, and missing in the restored state"):
            manager.resume({"optimizer": own})
    assert own.loaded == 1


def test_optimizer_of_a_program_is_compared_by_its_parameters_alone(tmp_path: Path) -> None:
    class Own(OPTIM.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"betas": 0.5})

        def step(self, closure: Any = None) -> None:
            pass

    resume(tmp_path, lambda m: OPTIM.SGD(m.parameters()), lambda m: Own(m.parameters()))
    with pytest.raises(StateMismatch, match=r"\['params'\] are 2, stored are 4"):
        resume(tmp_path, adamw, lambda m: Own(m[0].parameters()))


def test_wrapped_optimizer_is_compared_as_the_one_in_it(tmp_path: Path) -> None:
    class Wrapper(OPTIM.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

        def load_state_dict(self, state_dict: Any) -> None:
            self.optimizer.load_state_dict(state_dict)

    with pytest.raises(StateMismatch, match="another than SGD"):
        resume(tmp_path, adamw, lambda m: Wrapper(OPTIM.SGD(m.parameters())))


# What integrations with frameworks that load the optimizer themselves compare.


class OwnAdam(OPTIM.Adam):  # type: ignore[misc, name-defined]
    """An Adam of a program."""


def compare(given: _Make, saved: _Make, *, is_recorded: bool) -> None:
    """Compare as an integration does, with the class of the saved optimizer, or without it."""
    old = trained(saved)
    step(old)
    optimizer, state = trained(given)["optimizer"], old["optimizer"].state_dict()
    stored_class = class_of(old["optimizer"]) if is_recorded else None
    found = all_problems(optimizer, state, stored_class, StatePath().key("optimizer"))
    check_same(found, hint="build the same")


def test_recorded_class_of_another_optimizer_is_named() -> None:
    def adam(model: Any) -> Any:
        return OPTIM.Adam(model.parameters())

    def own(model: Any) -> Any:
        return OwnAdam(model.parameters())

    with pytest.raises(StateMismatch) as caught:
        compare(adamw, adam, is_recorded=True)
    assert str(caught.value) == (
        "the checkpoint is of another optimizer or schedule:\n"
        "  state['optimizer'] is a torch.optim.AdamW, stored is the state of a torch.optim.Adam\n"
        "hint: build the same"
    )
    with pytest.raises(StateMismatch, match=r"is a OwnAdam, stored .* torch.optim.Adam\n"):
        compare(own, adam, is_recorded=True)
    compare(own, adam, is_recorded=False)
    with pytest.raises(StateMismatch, match="Adam and AdamW differ"):
        compare(adamw, adam, is_recorded=False)


def test_recorded_class_is_that_in_the_wrapper_of_accelerate_but_in_no_other() -> None:
    class Lookahead:
        optimizer = adamw(trained(adamw)["model"])

    class Accelerated(Lookahead):
        __module__ = "accelerate.optimizer"

    assert class_of(Accelerated()) == "torch.optim.AdamW"
    assert class_of(Lookahead()) == "Lookahead"
