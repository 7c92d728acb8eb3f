"""The names that options accept are those of what they name."""

import dataclasses
import inspect

from plsc import names
from plsc.heads.margins import MARGINS
from plsc.models import NETWORKS
from plsc.optim import OPTIMIZERS
from plsc.predict.protocols import Evaluator, ProtocolData
from plsc.train.log import LOGGERS
from plsc.train.run import CALLBACKS


def test_names_are_those_of_the_owners():
    for listed, owned in (
        (names.NETWORKS, NETWORKS),
        (names.MARGINS, MARGINS),
        (names.OPTIMIZERS, OPTIMIZERS),
        (names.LOGGERS, LOGGERS),
        (names.CALLBACKS, CALLBACKS),
    ):
        assert listed == tuple(owned)


def test_each_protocol_has_its_method_and_only_known_arguments():
    known = {field.name for field in dataclasses.fields(ProtocolData)}
    for name, arguments in names.PROTOCOLS.items():
        assert hasattr(Evaluator, f"run_{name}")
        assert known.issuperset(arguments)


def test_losses_without_a_margin_have_no_argument_for_one():
    arguments = {name: inspect.signature(margin).parameters for name, margin in MARGINS.items()}
    without = [name for name, found in arguments.items() if not any("margin" in one for one in found)]
    assert set(names.NO_MARGIN) == set(without)
