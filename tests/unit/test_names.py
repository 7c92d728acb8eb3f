"""The names that options accept are those of what they name."""

from plsc import names
from plsc.heads.margins import MARGINS
from plsc.models.registry import NETWORKS
from plsc.optim.optimizers import OPTIMIZERS
from plsc.train.loggers import LOGGERS
from plsc.train.loop import CALLBACKS


def test_names_are_those_of_the_owners():
    for listed, owned in (
        (names.NETWORKS, NETWORKS),
        (names.MARGINS, MARGINS),
        (names.OPTIMIZERS, OPTIMIZERS),
        (names.LOGGERS, LOGGERS),
        (names.CALLBACKS, CALLBACKS),
    ):
        assert listed == tuple(owned)
