"""The margins: how each loss changes the logit of a sample's label.

A margin maps the cosine c between an embedding and the weights of its class to psi(c). The logit of the label
is scale * psi(c), the other logits are scale * c (CurricularFace changes some of them: `Margin.hard`). All
functions work on one value per sample, and autograd computes their slopes. tests/reference.py has the papers'
formulas with acos on the full logit matrix. How to add a margin: docs/extending.md.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, did_you_mean, refusing, suggest

_RIGHT_ANGLE = math.pi / 2

COSINE_LIMIT = 1.0 - 1e-7
"""Cosines are clamped to +-COSINE_LIMIT, because the slope of acos is infinite at +-1."""

MANY_CLASSES = 10_000
"""From this number of classes on, the automatic scale is 64."""


class Margin(nn.Module, ABC):
    """Base class of the margins. Keep running statistics in buffers.

    The first line of a margin's docstring, up to its reference, is its formula in docs/options.md.

    Attributes:
        name: the loss type without ``dist_``, as in plsc/names.py.
        is_cosine: embeddings and class weights are normalised. False: plain softmax with a bias, scale 1.
        needs_all_cosines: `observe` and `hard` need the target cosines of the global batch on every rank.
        uses_norm: `target` or `regulariser` has a gradient with respect to the embedding's norm.
        scale: s, the logit of a cosine of 1. "auto" becomes sqrt(2) ln(C - 1) for C classes, at least 1
            (Zhang et al. 2019, "AdaCos", eq. 12), and 64 from 10,000 classes on, as in face recognition
            papers; NaN until a head uses the margin. `observe` may change it: all logits use the new value.
        margin: m, if the loss has one. With margins per class, the head sets it before `target` and `hard` to
            those of the samples, [T].
        class_margins: margins of the head's classes [C_local], not in checkpoints, or None: one for all.
        share: fraction of the margin that applies, in [0, 1]; set it before a step (margin warm-up). The
            logit of the label is scale * (c + share * (psi - c)); nothing else depends on it.
    """

    name: str
    is_cosine = True
    needs_all_cosines = False
    uses_norm = False
    share = 1.0
    margin: float | Tensor
    class_margins: Tensor | None

    def __init__(self, scale: float | str) -> None:
        super().__init__()
        self._limits: dict[str, tuple[float, float]] = {}
        self.register_buffer("class_margins", None, persistent=False)
        self.is_auto_scale = scale == "auto"
        self.scale = math.nan if scale == "auto" else self._number("scale", float(scale), 0, above=True)

    def set_class_num(self, class_num: int) -> None:
        """Set the automatic scale for this number of classes; called by the head's constructor."""
        if self.is_auto_scale:
            few = max(1.0, math.sqrt(2) * math.log(max(1, class_num - 1)))
            self.scale = few if class_num < MANY_CLASSES else 64.0

    def set_class_margins(self, margins: Tensor, counts: Tensor | None = None) -> None:
        """Use one margin per class, margins [C], instead of `margin`; call it before you create the head.

        counts: images per class [C], for the message. Raises OptionError for a margin that the argument
        margin may not have; KeyError if the loss has no such argument.
        """
        margins, (low, high) = margins.flatten(), self._limits["margin"]
        wrong = ~((margins >= low) & (margins <= high) & margins.isfinite())
        if wrong.any():
            first = int(wrong.nonzero()[0])
            images = "" if counts is None else f" ({int(counts[first]):,} images)"
            self._number(f"the margin of class {first}{images}", float(margins[first]), low, high)
        self.class_margins = margins

    def keep_classes(self, class_num: int, start: int, stop: int, dtype: torch.dtype) -> None:
        """Keep only the margins of classes start..stop-1; called by the head's constructor."""
        if self.class_margins is None:
            return
        if (count := len(self.class_margins)) != class_num:
            raise OptionError(f"{count:,} margins for {class_num:,} classes; pass one margin per class")
        self.class_margins = self.class_margins[start:stop].to(dtype, copy=True)

    def _number(
        self, option: str, value: Any, low: float, high: float = math.inf, above: bool = False
    ) -> float:
        """Return an option as float; OptionError unless it is in [low, high], or (low, high] if `above`."""
        self._limits[option] = low, high
        if math.isfinite(value) and low <= value <= high and not (above and value == low):
            return float(value)
        least = f"more than {low:g}" if above else f"at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise OptionError(f"{option} of {self.name} is {value:g}; expected a number, {least}{most}")

    @abstractmethod
    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi [T], differentiable; the logit of the label is scale * psi.

        cosine: [T], between the embeddings of any T samples and the weights of their class. norm: [T], of
        these embeddings. T is a part of the batch, in any order: what depends on the whole batch belongs into
        `observe`. For random numbers, use `weights.noise` of the norm and a counted step: torch's generators
        would differ by the number of ranks.
        """

    def shared_target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return c + share * (psi - c) [T]; exactly psi if share is 1."""
        return torch.lerp(cosine, self.target(cosine, norm), self.share)

    @torch.no_grad()
    def observe(self, cosine: Tensor | None, norm: Tensor) -> None:
        """Update running statistics from the global batch; called in training before `target` and `hard`.

        cosine: the target cosines [B] if `needs_all_cosines`, else None. norm: [B], of the embeddings.
        """

    def hard(self, cosine: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (threshold [T], scalar tensor t) for detached target cosines [T]; None: no hard classes.

        A class other than the label whose cosine c exceeds the threshold gets the logit scale * c (t + c).
        """
        return None

    def regulariser(self, norm: Tensor) -> Tensor | None:
        """Return a term to add to each sample's loss, [T] for norms [T], differentiable; or None."""
        return None

    def highest(self) -> float | None:
        """Return an upper bound of all logits, scale included; None: unbounded."""
        return self.scale if self.is_cosine else None

    def lowest_other(self) -> float | None:
        """Return a lower bound of the logits other than the label's; None: unbounded."""
        return -self.scale if self.is_cosine else None


class Softmax(Margin):
    """z = x W^T + b, the plain softmax: no normalisation, no scale, no margin."""

    name = "softmax"
    is_cosine = False

    def __init__(self) -> None:
        super().__init__(scale=1.0)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return the logit unchanged; `cosine` is x . W_y + b_y here."""
        return cosine


class ArcFace(Margin):
    """psi = cos(acos(c) + m) (Deng et al. 2019, "ArcFace", eq. 3).

    Where acos(c) + m exceeds pi, psi = c - m sin m, as in the authors' code. margin: m, radians in
    [0, pi/2]. easy_margin: psi = c wherever c <= 0.
    """

    name = "arcface"

    def __init__(self, scale: float | str = 64.0, margin: float = 0.5, easy_margin: bool = False) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 0, _RIGHT_ANGLE)
        self.easy_margin = easy_margin

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi."""
        return add_angle(cosine, self.margin, self.easy_margin)


class CosFace(Margin):
    """psi = c - m (Wang et al. 2018, "CosFace", eq. 4). margin: m in [0, 2]; 0: NormFace."""

    name = "cosface"

    def __init__(self, scale: float | str = 64.0, margin: float = 0.35) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 0, 2)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return c - m."""
        return cosine - self.margin


class SphereFace(Margin):
    """psi = (-1)^k cos(m theta) - 2 k, k = floor(m theta / pi) (Liu et al. 2017, "SphereFace", eq. 7).

    margin: m >= 1, not necessarily an integer. The paper scales by the embedding's norm, with m = 4. Here the
    scale is constant, as in the authors' later OpenSphere code, which uses s = 32, m = 1.7 (MS1MV2) and
    s = 30, m = 1.5 (VGGFace2). That code uses slope 1 for psi; here psi is differentiated.
    """

    name = "sphereface"

    def __init__(self, scale: float | str = 64.0, margin: float = 1.7) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 1)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi, which decreases from 1 at theta = 0 to -1 or less at theta = pi."""
        return monotonic_cosine(self.margin * angle_of(cosine))


class CombinedMargin(Margin):
    """psi = cos(m1 theta + m2) - m3 (Deng et al. 2019, "ArcFace", eq. 4).

    margins: (m1, m2, m3), m1 > 0, m2 in [0, pi/2], m3 in [0, 2]; the default and (0.9, 0.4, 0.15) are the
    paper's. Where the angle phi = m1 theta + m2 exceeds pi, psi continues to decrease as SphereFace does:
    (-1)^k cos(phi) - 2 k - m3. So (1, 0, m) is CosFace and (m, 0, 0) is SphereFace. (1, m, 0) is ArcFace up
    to pi; beyond pi ArcFace uses c - m sin m instead.
    """

    name = "combined"

    def __init__(self, scale: float | str = 64.0, margins: Sequence[float] = (1.0, 0.3, 0.2)) -> None:
        super().__init__(scale)
        m1, m2, m3 = margins
        self.margins = (
            self._number("margins[0]", m1, 0, above=True),
            self._number("margins[1]", m2, 0, _RIGHT_ANGLE),
            self._number("margins[2]", m3, 0, 2),
        )

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi."""
        m1, m2, m3 = self.margins
        return monotonic_cosine(m1 * angle_of(cosine) + m2) - m3


class AdaFace(Margin):
    """psi = cos(theta - m q) - (m + m q), q from the embedding's norm (Kim et al. 2022, "AdaFace", sec. 3.3).

    q = clip(h (norm - mean) / (std + 1e-3), -1, 1), with norms clipped to [1e-3, 100]; q has no gradient.
    mean and std (unbiased, over the global batch) are running averages that start at 20 and 100. A batch of
    one sample does not change std. margin: m in [0, pi/2]. h: >= 0. momentum: weight of the old average, 0.99
    in the authors' code. As in that code, theta - m q is clipped to [1e-3, pi - 1e-3], because psi must not
    decrease again for a good sample with theta < m q. Unlike that code, cosines are not clipped to +-0.999.
    """

    name = "adaface"
    mean: Tensor
    std: Tensor

    def __init__(
        self, scale: float | str = 64.0, margin: float = 0.4, h: float = 0.333, momentum: float = 0.99
    ) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 0, _RIGHT_ANGLE)
        self.h = self._number("h", h, 0)
        self.momentum = self._number("momentum", momentum, 0, 1)
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    @torch.no_grad()
    def observe(self, cosine: Tensor | None, norm: Tensor) -> None:
        """Update mean and std from the norms [B] of the global batch."""
        norm = norm.clamp(1e-3, 100)
        if len(norm) > 0:
            self.mean.mul_(self.momentum).add_((1 - self.momentum) * norm.mean())
        if len(norm) > 1:
            self.std.mul_(self.momentum).add_((1 - self.momentum) * norm.std())

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi, which has no gradient with respect to the norm."""
        norm = norm.detach().clamp(1e-3, 100)
        quality = (self.h * (norm - self.mean) / (self.std + 1e-3)).clamp(-1, 1)
        angle = angle_of(cosine) - self.margin * quality
        return angle.clamp(1e-3, math.pi - 1e-3).cos() - self.margin * (1 + quality)


class MagFace(Margin):
    """psi as ArcFace, with a margin m(a) that grows with the norm a (Meng et al. 2021, "MagFace", sec. 3.2).

    m(a) is linear from margin_range[0] at a = norm_range[0] to margin_range[1] at norm_range[1]. a is clipped
    to norm_range, as in the authors' code, so the norm has no gradient outside that range: the network's
    initial norms must be inside. regularisation: lambda_g of the added loss lambda_g (a / u_a^2 + 1 / a) with
    u_a = norm_range[1]; 35 in the authors' scripts. easy_margin: as in `ArcFace`, on by default, as in the
    authors' code.
    """

    name = "magface"
    uses_norm = True

    def __init__(
        self,
        scale: float | str = 64.0,
        norm_range: Sequence[float] = (10.0, 110.0),
        margin_range: Sequence[float] = (0.45, 0.8),
        regularisation: float = 35.0,
        easy_margin: bool = True,
    ) -> None:
        super().__init__(scale)
        (low, high), (low_margin, high_margin) = norm_range, margin_range
        self.norm_range = (
            self._number("norm_range[0]", low, 0, above=True),
            self._number("norm_range[1]", high, low, above=True),
        )
        self.margin_range = (
            self._number("margin_range[0]", low_margin, 0, _RIGHT_ANGLE),
            self._number("margin_range[1]", high_margin, low_margin, _RIGHT_ANGLE),
        )
        self.regularisation = self._number("regularisation", regularisation, 0)
        self.easy_margin = easy_margin

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi, differentiable in cosine and norm."""
        (low, high), (low_margin, high_margin) = self.norm_range, self.margin_range
        share = (norm.clamp(low, high) - low) / (high - low)
        margin = low_margin + (high_margin - low_margin) * share
        return add_angle(cosine, margin, self.easy_margin)

    def regulariser(self, norm: Tensor) -> Tensor:
        """Return lambda_g (a / u_a^2 + 1 / a) [T], which has its minimum at a = u_a."""
        a = norm.clamp(*self.norm_range)
        return self.regularisation * (a / self.norm_range[1] ** 2 + 1 / a)


class CurricularFace(Margin):
    """psi as ArcFace; hard classes use c (t + c) instead of c (Huang et al. 2020, sec. 3.2).

    A class is hard for a sample if its cosine exceeds cos(theta_y + m), also where the angle exceeds pi. t is
    the running mean of the target cosines of the global batch, starts at 0 and is updated before it is used.
    margin: m, radians in [0, pi/2]. momentum: weight of the old mean, 0.99 in the authors' code (in the paper
    it is the weight of the new value).
    """

    name = "curricularface"
    needs_all_cosines = True
    t: Tensor

    def __init__(self, scale: float | str = 64.0, margin: float = 0.5, momentum: float = 0.99) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 0, _RIGHT_ANGLE)
        self.momentum = self._number("momentum", momentum, 0, 1)
        self.register_buffer("t", torch.tensor(0.0))

    @torch.no_grad()
    def observe(self, cosine: Tensor | None, norm: Tensor) -> None:
        """Update t from the target cosines [B] of the global batch."""
        if cosine is None:
            raise ValueError("cosine is None; curricularface needs the target cosines of the global batch")
        if len(cosine) > 0:
            mean = cosine.clamp(-1, 1).mean()
            self.t.mul_(self.momentum).add_((1 - self.momentum) * mean)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return cos(acos(c) + m), or c - m sin m where the angle exceeds pi."""
        return add_angle(cosine, self.margin)

    @torch.no_grad()
    def hard(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos(theta_y + m) [T], t)."""
        return add_angle(cosine, self.margin, beyond_pi=True), self.t.clone()

    def highest(self) -> float:
        """Return 2 s, the logit at t = c = 1."""
        return 2 * self.scale


# Angles, with exact and finite gradients near +-1.


def clamp_cosine(cosine: Tensor) -> Tensor:
    """Clamp to +-COSINE_LIMIT with slope 1, so that a saturated sample still gets a gradient."""
    return cosine + (cosine.clamp(-COSINE_LIMIT, COSINE_LIMIT) - cosine).detach()


def sine_of(cosine: Tensor) -> Tensor:
    """Return sqrt(1 - c^2) for a cosine strictly inside +-1."""
    # 1 - c is exact near c = 1; in fp32 1 - c^2 would cause an error of 4e-5 in the slopes.
    return ((1 - cosine) * (1 + cosine)).sqrt()


def angle_of(cosine: Tensor) -> Tensor:
    """Return theta = acos(c) in (0, pi); unlike torch.acos, its slope is exact in fp32 near +-1."""
    c = clamp_cosine(cosine)
    return torch.atan2(sine_of(c), c)


def add_angle(cosine: Tensor, margin: float | Tensor, easy: bool = False, beyond_pi: bool = False) -> Tensor:
    """Return cos(acos(c) + m), or c - m sin m where the angle exceeds pi; m is [T] or a number.

    easy: return c wherever c <= 0 instead. beyond_pi: return cos(acos(c) + m) for all angles.
    """
    if not isinstance(margin, Tensor):
        margin = cosine.new_full((), margin)
    c = clamp_cosine(cosine)
    inside = c * margin.cos() - sine_of(c) * margin.sin()
    if beyond_pi:
        return inside
    if easy:
        return torch.where(c > 0, inside, c)
    return torch.where(c < -margin.cos(), c - margin * margin.sin(), inside)


def monotonic_cosine(angle: Tensor) -> Tensor:
    """Return (-1)^k cos(angle) - 2 k with k = floor(angle / pi), which decreases for all angles >= 0."""
    k = torch.floor(angle.detach() / math.pi)
    return (1 - 2 * (k % 2)) * angle.cos() - 2 * k


def margins_of_counts(counts: Tensor, a: float, b: float = 0.0) -> Tensor:
    """Return the margins m = a n^(-1/4) + b of classes with n images, float64 [C]; n = 0 counts as 1.

    b = 0: LDAM (Cao et al. 2019). a = 0.5, b = 0.05: Ha et al. 2020, "Google Landmark Recognition
    2020 Competition Third Place Solution", with ArcFace.
    """
    return a * counts.clamp(min=1).double() ** -0.25 + b


MARGINS: dict[str, type[Margin]] = {
    margin.name: margin
    for margin in list(vars().values())
    if isinstance(margin, type) and issubclass(margin, Margin) and "name" in vars(margin)
}
"""All margins of this file by name; those of the options and of the help are in plsc/names.py."""


def margin_arguments(name: str) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of the margin with this name."""
    return inspect.signature(MARGINS[name]).parameters


def build_margin(name: str, **options: Any) -> Margin:
    """Return the margin with this name; `options` are the arguments of its class.

    Raises OptionError for an unknown name, an unknown option, or an invalid value.
    """
    if name not in MARGINS:
        raise OptionError(f"unknown margin {name!r}; {suggest(name, MARGINS)}")
    known = list(margin_arguments(name))
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise OptionError(
                f"{name} has no option {option}; {has}{did_you_mean(option, known) or f'; remove {option}'}"
            )
    with refusing(f"cannot make {name} of {options}", "expected numbers as in its defaults"):
        return MARGINS[name](**options)
