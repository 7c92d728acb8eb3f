"""The margins: what each loss does to the logit of a sample's own class.

A margin turns the cosine c between an embedding and the row of its class into psi(c); that logit is
scale * psi(c), those of the other classes are scale * c (CurricularFace changes some of them:
`Margin.hard`). All here are vectors over samples, so autograd finds the slopes. The same formulas as
in the papers, with acos and on the full matrix: tests/reference.py. Adding one: docs/extending.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plsc.errors import OptionError, did_you_mean, suggest
from plsc.heads.geometry import add_angle, angle_of, falling_cosine, held, sine_of

_RIGHT_ANGLE = math.pi / 2

MANY_CLASSES = 10_000
"""From here on the automatic scale is the papers'."""


class Margin(nn.Module):
    """Base of the margins. A running state, where there is one, is kept in buffers.

    The first line of a margin's docstring, up to its reference, is its formula in docs/options.md.

    Attributes:
        name: of the loss type, without ``dist_``; on a line of its own: plsc/config/head.py reads it.
        is_cosine: embeddings and rows are normalised; False: plain softmax, raw ones, a bias, scale 1.
        needs_all_cosines: every rank needs the target cosine of every sample before the class rows
            are visited, for `observe` and `hard`.
        uses_norm: `target` or `regulariser` has a gradient with respect to the embedding's norm.
        scale: s, the logit of a cosine of 1. "auto" becomes sqrt(2) ln(C - 1) of the head's C classes, at
            least 1 (Zhang et al. 2019, "AdaCos", eq. 12), or 64 from 10,000 classes on, as in the papers on
            faces; NaN before the margin has a head.
        share: of the margin, in [0, 1], set before a step (margin warm-up): the label's logit is
            scale * (c + share * (psi - c)). Other logits and the regulariser do not depend on it.
    """

    name: str
    is_cosine = True
    needs_all_cosines = False
    uses_norm = False
    share = 1.0

    def __init__(self, scale: float | str) -> None:
        super().__init__()
        self.is_auto_scale = scale == "auto"
        self.scale = math.nan if scale == "auto" else self._number("scale", float(scale), 0, above=True)

    def set_class_num(self, class_num: int) -> None:
        """Take the number of classes, before anything is computed; the head's constructor calls it."""
        if self.is_auto_scale:
            few = max(1.0, math.sqrt(2) * math.log(max(1, class_num - 1)))
            self.scale = few if class_num < MANY_CLASSES else 64.0

    def _number(
        self, option: str, value: Any, low: float, high: float = math.inf, above: bool = False
    ) -> float:
        """Return an option of this margin: finite, in [low, high], and not `low` itself if `above`."""
        if math.isfinite(value) and low <= value <= high and not (above and value == low):
            return float(value)
        least = f"more than {low:g}" if above else f"at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise OptionError(f"{option} of {self.name} is {value:g}; expected a number of {least}{most}")

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi [T], differentiable; the logit is scale * psi.

        cosine [T]: of any T samples with the row of their class; norm [T]: of their embeddings.
        """
        raise NotImplementedError

    def shared_target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return c + share * (psi - c) [T]; exactly psi at a share of 1."""
        return torch.lerp(cosine, self.target(cosine, norm), self.share)

    @torch.no_grad()
    def observe(self, cosine: Tensor | None, norm: Tensor) -> None:
        """Update the running state from the global batch; in training, before `target` and `hard`.

        norm [B]; cosine [B], the target cosines, given if `needs_all_cosines`.
        """

    def hard(self, cosine: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (threshold [T], t, 0-dim) for target cosines [T], detached; None: no hard classes.

        Another class whose cosine c is above the threshold gets the logit scale * c (t + c).
        """
        return None

    def regulariser(self, norm: Tensor) -> Tensor | None:
        """Return what is added to the loss of each sample, [T] for norms [T], differentiable; or None."""
        return None

    def highest(self) -> float | None:
        """Return a bound that no logit exceeds, scale included; None: raw logits have none."""
        return self.scale if self.is_cosine else None

    def lowest_other(self) -> float | None:
        """Return what no logit of a class other than the label's falls below; None: as above."""
        return -self.scale if self.is_cosine else None


class Softmax(Margin):
    """z = x W^T + b, the plain softmax: no normalisation, no scale, no margin."""

    name = "softmax"
    is_cosine = False

    def __init__(self) -> None:
        super().__init__(scale=1.0)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return the logit as it is; `cosine` is x . W_y + b_y here."""
        return cosine


class NormFace(Margin):
    """psi = c: the softmax of scaled cosines (Wang et al. 2017, "NormFace"; Deng et al. 2019, eq. 2)."""

    name = "normface"

    def __init__(self, scale: float | str = 64.0) -> None:
        super().__init__(scale)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return c."""
        return cosine


class ArcFace(Margin):
    """psi = cos(acos(c) + m) (Deng et al. 2019, "ArcFace", eq. 3).

    Where acos(c) + m passes pi, psi = c - m sin m, as in the authors' code. margin: m, radians in
    [0, pi/2]. easy_margin: psi = c wherever c <= 0. straight_through: the slope of psi is taken as 1, as
    some published implementations have it; the loss is the same.
    """

    name = "arcface"

    def __init__(
        self,
        scale: float | str = 64.0,
        margin: float = 0.5,
        easy_margin: bool = False,
        straight_through: bool = False,
    ) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 0, _RIGHT_ANGLE)
        self.easy_margin, self.straight_through = easy_margin, straight_through

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return cos(acos(c) + m) or what stands in for it."""
        psi = add_angle(cosine, cosine.new_full((), self.margin), self.easy_margin)
        return cosine + (psi - cosine).detach() if self.straight_through else psi


class CosFace(Margin):
    """psi = c - m (Wang et al. 2018, "CosFace", eq. 4). margin: m in [0, 2]."""

    name = "cosface"

    def __init__(self, scale: float | str = 64.0, margin: float = 0.35) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 0, 2)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return c - m."""
        return cosine - self.margin


class SphereFace(Margin):
    """psi = (-1)^k cos(m theta) - 2 k, k = floor(m theta / pi) (Liu et al. 2017, "SphereFace", eq. 7).

    margin: m >= 1, a whole number or not. The paper scales by the embedding's norm, with m = 4. Here the
    scale is a constant, as in the authors' later OpenSphere code, whose settings are s = 32, m = 1.7 (MS1MV2)
    and s = 30, m = 1.5 (VGGFace2); that code takes the slope of psi as 1, here it is differentiated.
    """

    name = "sphereface"

    def __init__(self, scale: float | str = 64.0, margin: float = 1.7) -> None:
        super().__init__(scale)
        self.margin = self._number("margin", margin, 1)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return psi, which falls all the way from 1 at theta = 0 to below -1 at theta = pi."""
        return falling_cosine(self.margin * angle_of(cosine))


class CombinedMargin(Margin):
    """psi = cos(m1 theta + m2) - m3 (Deng et al. 2019, "ArcFace", eq. 4).

    margins: (m1, m2, m3), m1 > 0, m2 in [0, pi/2], m3 in [0, 2]; the default and (0.9, 0.4, 0.15) are the
    paper's. Where the angle phi = m1 theta + m2 passes pi, psi goes on falling without a jump, as
    SphereFace does: (-1)^k cos(phi) - 2 k - m3. So (1, 0, m) is CosFace, (m, 0, 0) SphereFace, and
    (1, m, 0) ArcFace up to pi; past it ArcFace jumps down to c - m sin m, a line of slope 1 in c.
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
        return falling_cosine(m1 * angle_of(cosine) + m2) - m3


class AdaFace(Margin):
    """psi = cos(theta - m q) - (m + m q), q from the embedding's norm (Kim et al. 2022, "AdaFace", sec. 3.3).

    q = clip(h (norm - mean) / (std + 1e-3), -1, 1), norms clipped to [1e-3, 100], without a gradient;
    mean and std (unbiased, over the global batch) are running averages that begin at 20 and 100. margin:
    m in [0, pi/2]; h >= 0; momentum: the share that the old average keeps, 0.99 in the authors' code. A batch
    of one sample has no deviation: std stays. As in that code theta - m q is clipped to
    [1e-3, pi - 1e-3], where the slope is 0: psi must not fall again as a good sample passes theta = m q.
    Unlike it, cosines are not first clipped to +-0.999.
    """

    name = "adaface"
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        scale: float | str = 64.0,
        margin: float = 0.4,
        h: float = 0.333,
        momentum: float = 0.99,
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
        """Return psi, without a gradient to the norm."""
        norm = norm.detach().clamp(1e-3, 100)
        quality = (self.h * (norm - self.mean) / (self.std + 1e-3)).clamp(-1, 1)
        angle = angle_of(cosine) - self.margin * quality
        return angle.clamp(1e-3, math.pi - 1e-3).cos() - self.margin * (1 + quality)


class MagFace(Margin):
    """psi as ArcFace, with a margin m(a) that grows with the norm a (Meng et al. 2021, "MagFace", sec. 3.2).

    m(a) is linear from margin_range[0] at a = norm_range[0] to margin_range[1] at norm_range[1]; a is
    clipped to norm_range, so outside of it nothing pulls at the norm, as in the authors' code: give
    the network a last layer whose norms begin inside. regularisation: lambda_g of
    lambda_g (a / u_a^2 + 1 / a), u_a = norm_range[1]; 35 in the authors' scripts (20 in their parser, below
    the 22.6 that their own check asks for). easy_margin: as in `ArcFace`, but set, as in
    the authors' code.
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
        """Return lambda_g (a / u_a^2 + 1 / a), [T], which is least at a = u_a."""
        a = norm.clamp(*self.norm_range)
        return self.regularisation * (a / self.norm_range[1] ** 2 + 1 / a)


class CurricularFace(Margin):
    """psi as ArcFace; other classes that are hard get c (t + c) for c (Huang et al. 2020, sec. 3.2).

    A class is hard for a sample if its cosine is above cos(theta_y + m), whatever stands in for that past
    pi. t, which begins at 0, is the running mean of the target cosines of the global batch, brought up
    to date before it is used. margin: m, radians in [0, pi/2]; momentum: the share that the old
    mean keeps, 0.99 in the authors' code (the paper writes it the other way round).
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
            raise ValueError("curricularface needs the target cosines of the global batch")
        if len(cosine) > 0:
            mean = cosine.clamp(-1, 1).mean()
            self.t.mul_(self.momentum).add_((1 - self.momentum) * mean)

    def target(self, cosine: Tensor, norm: Tensor) -> Tensor:
        """Return cos(acos(c) + m), or c - m sin m past pi."""
        return add_angle(cosine, cosine.new_full((), self.margin))

    @torch.no_grad()
    def hard(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos(theta_y + m) [T], t)."""
        c = held(cosine)
        return c * math.cos(self.margin) - sine_of(c) * math.sin(self.margin), self.t.clone()

    def highest(self) -> float:
        """Return 2 s, the logit at t = c = 1."""
        return 2 * self.scale


MARGINS: dict[str, type[Margin]] = {
    margin.name: margin
    for margin in list(vars().values())
    if isinstance(margin, type) and issubclass(margin, Margin) and "name" in vars(margin)
}
"""The margins of this file by name: the loss types, their checks, help and tables derive from it."""


def build_margin(name: str, **options: Any) -> Margin:
    """Return the margin of this name; `options` are the arguments of its class.

    Raises OptionError for an unknown name, an option that this margin does not have, or a bad value.
    """
    if name not in MARGINS:
        raise OptionError(f"margin {name!r} is not known; {suggest(name, MARGINS)}")
    known = list(inspect.signature(MARGINS[name]).parameters)
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has no options"
            raise OptionError(f"{name} has no {option}; {has}{did_you_mean(option, known)}")
    return MARGINS[name](**options)
