"""The learning rate is a function of the number of updates."""

import functools
import math

import pytest

from plsc.config import Options
from plsc.entry import Entry
from plsc.errors import OptionError
from plsc.train.build import build_schedule, with_rate
from plsc.train.callbacks import Length


def schedule(function=None, total=None, epoch=None, **changes):
    options = Options()
    for name, value in changes.items():
        options.set(f"optim.{name}", value)
    optim, until = options.optim, Length(0, 0, epoch).until
    return build_schedule(optim.schedule, optim.lr or 0.1, optim.warmup_steps, total, until, function)


def halving(step, total_steps):
    return 0.5 if step >= total_steps / 2 else 1.0


def resolved(changes, saved=None, total=370):
    options = Options()
    for name, value in changes.items():
        options.set(f"optim.{name}", value)
    return with_rate(options.resolve(saved and {"optim": saved}), 512, total).optim


COSINE = {"name": "cosine", "steps": 50}


@pytest.mark.parametrize(
    ("changes", "saved", "total", "expected"),
    [
        ({}, None, 370, {"schedule": "cosine", "lr": 0.05, "warmup_steps": 37}),
        ({}, None, 10**6, {"warmup_steps": 1000}),
        ({}, None, None, {"schedule": "constant", "warmup_steps": 100}),
        ({"schedule": COSINE}, None, None, {"schedule": COSINE, "warmup_steps": 5}),
        ({"schedule": "my_package.rates:falling"}, None, 370, {"warmup_steps": 0}),
        ({}, {"schedule": "step", "schedule_arguments": None}, 370, {"schedule": "step"}),
        ({"lr": 0.01}, None, 370, {"lr": 0.01, "clip_norm": 20}),
        ({"lr": 0.1, "clip_norm": 0}, None, 370, {"clip_norm": 0}),
        ({"clip_norm": 7}, None, 370, {"clip_norm": 7}),
        ({"warmup_steps": "2ep"}, None, 370, {"warmup_steps": "2ep"}),
        # An option that is gone, in a checkpoint; the script's warm-up replaces that of the checkpoint.
        ({}, {"warmup_epochs": 0, "warmup_steps": 12}, 370, {"warmup_steps": 12}),
        ({"warmup_steps": "1ep"}, {"warmup_steps": 12}, 370, {"warmup_steps": "1ep"}),
        ({"warmup_steps": 5}, {"warmup_steps": "2ep"}, 370, {"warmup_steps": 5}),
    ],
)
def test_defaults_of_rate_schedule_clipping_and_warm_up_depend_on_batch_and_length(
    changes, saved, total, expected
):
    optim = resolved(changes, saved, total)
    assert {name: getattr(optim, name) for name in expected} == expected


@pytest.mark.parametrize("name", ["step", "multi_step"])
def test_the_rate_decays_at_each_boundary(name):
    rate = schedule(schedule={"name": name, "boundaries": (10, 20)})
    values = [0.1, 0.1, 0.01, 0.01, 0.001]
    assert [rate(step) for step in (0, 9, 10, 19, 20)] == pytest.approx(values)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_steps": "2ep", "epoch": 2}])
def test_warm_up_increases_linearly_to_the_base_rate(warmup):
    rate = schedule(schedule="constant", **warmup)
    assert [rate(step) for step in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_decaying_schedules_go_from_base_to_end_after_the_warm_up():
    falling = functools.partial(schedule, lr=0.2, total=12, warmup_steps=2)
    rate = falling(schedule={"name": "polynomial", "end_factor": 0.1, "power": 2.0})
    assert [rate(0), rate(1), rate(2)] == pytest.approx([0.1, 0.2, 0.2])
    assert rate(7) == pytest.approx(0.2 * (0.1 + 0.9 * 0.25))
    assert rate(12) == rate(100) == pytest.approx(0.02)
    rate = falling(schedule={"name": "exponential", "end_factor": 0.1})
    assert [rate(2), rate(7), rate(12), rate(99)] == pytest.approx([0.2, 0.2 * 0.1**0.5, 0.02, 0.02])
    rate = schedule(schedule="cosine", total=10)
    assert [rate(0), rate(5), rate(10), rate(11)] == pytest.approx([0.1, 0.05, 0, 0])
    rate = schedule(schedule={"name": "cosine", "steps": 4}, total=10)
    assert rate(2) == pytest.approx(0.05)
    assert rate(4) == pytest.approx(0)
    assert schedule(schedule="constant")(10**6) == 0.1


def test_cosine_cycles_restart_at_the_base_rate():
    rate = schedule(schedule={"name": "cosine", "cycles": 3}, total=9)
    one = [0.1, 0.05 * (1 + math.cos(math.pi / 3)), 0.05 * (1 + math.cos(2 * math.pi / 3))]
    assert [rate(step) for step in range(12)] == pytest.approx(one * 3 + [0.0] * 3)


def test_a_custom_schedule_multiplies_the_rate_after_the_warm_up():
    ins = Entry()
    ins.set_lr_schedule(lambda step: 2.0**-step)
    assert ins.options.optim.schedule.startswith(f"{__name__}:test_a_custom")
    rate = schedule(lambda step: 2.0**-step, schedule=ins.options.optim.schedule, warmup_steps=2)
    assert [rate(0), rate(1), rate(3)] == pytest.approx([0.05, 0.1, 0.1 / 8])
    by_name = schedule(schedule=f"{__name__}:halving", total=10)
    assert [by_name(4), by_name(5)] == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize(
    ("factor", "step", "noun"),
    [
        (lambda step: -1.0, 0, "returned -1.0 for step 0"),
        (lambda step: None, 0, "None"),
        (lambda: 1.0, 0, "TypeError"),
        (lambda step: [1.0, 1.0][step], 2, "step 2: IndexError"),
        (lambda step: 10**400 if step else 1.0, 2, "step 2"),
    ],
)
def test_an_invalid_custom_schedule_raises_before_training_or_with_the_step(factor, step, noun):
    with pytest.raises(OptionError, match=noun):
        schedule(factor, schedule="some.module:function")(step)


def test_a_decay_that_ends_before_the_warm_up_raises():
    with pytest.raises(OptionError, match="ends after 3 steps, but the warm-up already takes 5 steps"):
        schedule(schedule={"name": "cosine", "steps": 3}, total=10, warmup_steps=5)
    assert schedule(schedule="cosine", total=3, warmup_steps=5)(0) > 0  # a short trial run


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"schedule": "cosine"}, r"train\.steps"),
        ({"warmup_steps": "2ep"}, r"optim\.warmup_steps"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": "__main__:mine"}, "training script"),
        ({"schedule": f"{__name__}:halvin"}, "no attribute 'halvin'"),
    ],
)
def test_a_schedule_that_cannot_be_built_raises(changes, noun):
    with pytest.raises(OptionError, match=noun):
        schedule(**changes)
