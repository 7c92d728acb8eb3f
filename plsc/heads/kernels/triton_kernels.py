"""The element-wise parts of the softmax as Triton kernels. Importing this module needs triton.

`triton_backend` launches them. Notation of docs/life_of_a_step.md. A launch processes a tile of `count` class
weights that starts at index `start` of the selected ones. c [B, width], row-major float32, are their products
with the batch; the columns from `count` on align the rows. Arguments that are None are removed from the
compiled kernel.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change per step or tile must not trigger a recompilation.
_CHANGING = ["start", "count", "samples", "first_row", "key"]


@triton.jit(do_not_specialize=_CHANGING)
def tile_weights(
    weight,
    position,
    start,
    out,
    count,
    dimension: tl.constexpr,
    is_cosine: tl.constexpr,
    size: tl.constexpr,
):
    """Write class weight `start` + program, normalised if is_cosine, to row `program` of out [width, D].

    Rows from `count` on are zero. weight: [rows, D], or int8 [rows, D + 4] as `encode_rows` of
    plsc/heads/weights.py. position: int64, indices of the selected rows in weight; None: consecutive.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, size)
    inside = column < dimension
    row = _position(position, start + tl.minimum(program, count - 1))
    w = _load_row(weight, row, column, inside, dimension)
    if is_cosine:
        w = w * _inverse_length(w)
    w = tl.where(program < count, w, 0.0)
    tl.store(out + program * dimension + column, w.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
def exponentials(
    c, bias, position, start, count, width, target, scale, threshold, hard_factor,
    shift, partial, samples, weighted, out, out_stride,
    dimension: tl.constexpr, centers: tl.constexpr, is_fixed: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Write exp(z - shift) * slope of a sample to out [B, width] or None; add the sum of exp to partial.

    partial: [blocks of columns, B]; one program changes each element, so that the sums are deterministic.
    is_fixed: a program computes `size` columns. Otherwise it computes all columns of a sample, raises `shift`
    [B] to their maximum first, and scales partial and weighted [B, D] or None to the new shift.
    """
    sample = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * size
    last = first + size if is_fixed else width
    place = partial + tl.program_id(1) * samples + sample
    total = tl.load(place)
    top = tl.load(shift + sample)
    if not is_fixed:
        tl.debug_barrier()  # all warps must read the shift before one writes it
        peaks = tl.full([size], float("-inf"), tl.float32)
        for at in range(first, last, size):
            z, slope = _logits(
                c, bias, position, start, count, width, target, sample, at + tl.arange(0, size), scale,
                threshold, hard_factor, centers,
            )  # fmt: skip
            peaks = tl.maximum(peaks, z)
        old = top
        top = tl.maximum(old, tl.max(peaks))
        tl.store(shift + sample, top)
        top = tl.where(top == float("-inf"), 0.0, top)  # no class yet
        correction = tl.exp(old - top)
        total *= correction
        if weighted is not None and correction != 1.0:
            for at in range(0, dimension, size):
                column = at + tl.arange(0, size)
                term = weighted + sample * dimension + column
                value = tl.load(term, mask=column < dimension, other=0.0)
                tl.store(term, value * correction, mask=column < dimension)
    sums = tl.zeros([size], tl.float32)
    for at in range(first, last, size):
        column = at + tl.arange(0, size)
        z, slope = _logits(
            c, bias, position, start, count, width, target, sample, column, scale, threshold, hard_factor,
            centers,
        )  # fmt: skip
        p = tl.exp(z - top)
        sums += p
        if out is not None:
            terms = (p * slope).to(out.dtype.element_ty)
            tl.store(out + sample * out_stride + column, terms, mask=column < width)
    tl.store(place, total + tl.sum(sums))


@triton.jit(do_not_specialize=_CHANGING)
def coefficients(
    c, bias, position, start, count, width, target, scale, threshold, hard_factor,
    log_total, kept, kept_stride, shift, target_row, target_coefficient, weight, out,
    centers: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Write weight_i G_ij to out [B, width], from c or from the kept output of `exponentials`."""
    sample = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * size + tl.arange(0, size)
    total = tl.load(log_total + sample)
    if kept is not None:
        terms = tl.load(kept + sample * kept_stride + column, mask=column < width, other=0.0)
        g = terms.to(tl.float32) * tl.exp(tl.load(shift + sample) - total)
    else:
        z, slope = _logits(
            c, bias, position, start, count, width, target, sample, column, scale, threshold, hard_factor,
            centers,
        )  # fmt: skip
        g = tl.exp(z - total) * slope
    is_target = start + column == tl.load(target_row + sample)
    g = tl.where(is_target, tl.load(target_coefficient + sample), g) * tl.load(weight + sample)
    tl.store(out + sample * width + column, g.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=_CHANGING)
def update(
    dw, weight, position, number, start, first_row, state, second_state, steps,
    lr, momentum, weight_decay, rest1, rest2, log_beta1, log_beta2, eps, key,
    dimension: tl.constexpr, is_cosine: tl.constexpr, kind: tl.constexpr, nesterov: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """Apply a rule of plsc.heads.weights to class weight `start` + program and its states, in place.

    dw: [count, D], gradients of the unit class weights if is_cosine. kind: sgd, adamw, adagrad; 'none': only
    replace dw by the gradient of the class weights. number: int64, indices of the selected rows, without
    `first_row`; None: consecutive. state: momentum, exp_avg or sum of squares, or None. second_state:
    exp_avg_sq, or None. rest1, rest2: 1 - beta1 and 1 - beta2.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, size)
    inside = column < dimension
    row = _position(position, start + program)
    place = row * dimension + column
    w = _load_row(weight, row, column, inside, dimension)
    g = tl.load(dw + program * dimension + column, mask=inside, other=0.0)
    if is_cosine:  # backward of the normalisation: (dw - (dw . w) w) / |W|
        inverse = _inverse_length(w)
        unit = w * inverse
        g = (g - tl.sum(g * unit) * unit) * inverse
    if kind == "none":
        tl.store(dw + program * dimension + column, g, mask=inside)
    else:
        row_number = (_position(number, start + program) + first_row).to(tl.int64)
        noise_key = key.to(tl.uint32, bitcast=True)
        if kind == "sgd":
            w = _sgd(
                w, g, state, place, inside, row_number, column, noise_key, lr, momentum, weight_decay,
                nesterov,
            )  # fmt: skip
        elif kind == "adamw":
            w = _adamw(
                w, g, state, second_state, steps + row, place, inside, row_number, column,
                noise_key, lr, weight_decay, rest1, rest2, log_beta1, log_beta2, eps,
            )  # fmt: skip
        else:
            w = _adagrad(w, g, state + row, inside, row_number, noise_key, lr, weight_decay, eps, dimension)
        if weight.dtype.element_ty == tl.int8:
            _encode(weight + row * (dimension + 4), w, inside, row_number, column, noise_key, dimension)
        else:
            _store(weight + place, w, inside, row_number, column, noise_key)


# The update formulas, as in plsc/heads/weights.py and rules.h.


@triton.jit
def _sgd(
    w, g, state, place, inside, row_number, column, key, lr, momentum, weight_decay, nesterov: tl.constexpr
):  # fmt: skip
    g += weight_decay * w
    if state is not None:
        m = tl.load(state + place, mask=inside, other=0.0).to(tl.float32) * momentum + g
        _store(state + place, m, inside, row_number, column, key + 1)
        g = g + momentum * m if nesterov else m
    return w - lr * g


@triton.jit
def _adamw(
    w, g, state, second_state, steps, place, inside, row_number, column, key, lr, weight_decay,
    rest1, rest2, log_beta1, log_beta2, eps,
):  # fmt: skip
    t = tl.load(steps) + 1
    tl.debug_barrier()  # all warps must read the count before one writes it
    tl.store(steps, t)
    m = tl.load(state + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second_state + place, mask=inside, other=0.0).to(tl.float32)
    m += rest1 * (g - m)
    v = (1 - rest2) * v + rest2 * (g * g)  # g * g may overflow
    _store(state + place, m, inside, row_number, column, key + 1)
    _store(second_state + place, v, inside, row_number, column, key + 2)
    w *= 1 - lr * weight_decay
    denominator = tl.sqrt(v / _one_minus_exp(t * log_beta2)) + eps
    return w - lr * (m / _one_minus_exp(t * log_beta1)) / denominator


@triton.jit
def _adagrad(w, g, state, inside, row_number, key, lr, weight_decay, eps, dimension: tl.constexpr):
    g += weight_decay * w
    h = tl.load(state).to(tl.float32) + tl.sum(tl.where(inside, g * g, 0.0)) / dimension
    tl.debug_barrier()  # as above
    first = tl.arange(0, 1)
    _store(state + first, h + tl.zeros_like(first), first == 0, row_number, first, key + 1)
    return w - lr * g / (tl.sqrt(h) + eps)


@triton.jit
def _position(positions, index):
    """Return positions[index], or index if positions is None."""
    if positions is not None:
        index = tl.load(positions + index)
    return index


@triton.jit
def _load_row(weight, row, column, inside, dimension: tl.constexpr):
    """Return a class weight as float32; 0 in columns that are not inside."""
    if weight.dtype.element_ty == tl.int8:
        place = weight + row * (dimension + 4)
        codes = tl.load(place + column, mask=inside, other=0)
        w = codes.to(tl.float32) * _load_scale(place + dimension)
    else:
        w = tl.load(weight + row * dimension + column, mask=inside, other=0.0).to(tl.float32)
    return w


@triton.jit
def _logits(
    c, bias, position, start, count, width, target, sample, column, scale, threshold, hard_factor,
    centers: tl.constexpr,
):  # fmt: skip
    """Return z and dz / dc / scale for some columns of a sample, as `TorchBackend._logits`."""
    cosine = _cosines(c, bias, position, start, count, width, sample, column)
    z = cosine * scale
    slope = tl.full(cosine.shape, 1.0, tl.float32)
    if threshold is not None:
        t = tl.load(hard_factor).to(tl.float32)
        hard = cosine > tl.load(threshold + sample)
        slope = tl.where(hard, t + 2 * cosine, 1.0)
        z = tl.where(hard, z * (t + cosine), z)
    row = start + column
    loses = (column >= count) | (row // centers == tl.load(target + sample))
    if centers > 1:
        center = row % centers
        for i in tl.static_range(centers):
            rival = _cosines(c, bias, position, start, count, width, sample, column - center + i)
            loses |= (rival > cosine) | ((rival == cosine) & (i < center))  # not a NaN
    return tl.where(loses, float("-inf"), z), slope


@triton.jit
def _cosines(c, bias, position, start, count, width, sample, column):
    """Return the products, with biases, for some columns of a sample."""
    cosine = tl.load(c + sample * width + column, mask=column < width, other=0.0)
    if bias is not None:
        inside = column < count
        place = start + column
        if position is not None:
            place = tl.load(position + place, mask=inside, other=0)
        cosine += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return cosine


@triton.jit
def _inverse_length(w):
    """Return 1 / |w|, or 0 if |w| counts as zero, as plsc/heads/softmax.py."""
    length = tl.sqrt(tl.sum(w * w))
    if (length < 2.0**-40) | (length == float("inf")):
        by = tl.where(length < 1.0, 2.0**100, 2.0**-100)
        length = tl.sqrt(tl.sum(w * by * (w * by))) / by
    return tl.where(length >= 2.0**-120, 1.0 / length, 0.0)


@triton.jit
def _one_minus_exp(x):
    """Return 1 - exp(x) for x <= 0; near 0 by a series, to avoid cancellation."""
    series = 1.0 + x / 7 * (1.0 + x / 8 * (1.0 + x / 9))
    series = 1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * series))
    series = -x * (1.0 + x / 2 * (1.0 + x / 3 * series))
    return tl.where(x > -0.5, series, 1.0 - tl.exp(x))


@triton.jit
def _store(place, values, inside, row_number, column, key):
    """Store float32 values in the dtype of `place`; bfloat16 is rounded as in plsc/heads/weights.py."""
    if place.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + (_noise(row_number, column, key) >> 16)) & 0xFFFF0000
        is_finite = (bits & 0x7F800000) != 0x7F800000
        values = tl.where(is_finite, rounded, bits).to(tl.float32, bitcast=True)
    tl.store(place, values.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _encode(place, values, inside, row_number, column, key, dimension: tl.constexpr):
    """Store float32 values as codes and scale at `place`, as `encode_rows` of plsc/heads/weights.py."""
    old = _load_scale(place + dimension)
    tl.debug_barrier()  # as in _adamw
    # As integers, magnitudes have the same order, and NaN is the largest.
    bits = tl.where(inside, values, 0.0).to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(bits).to(tl.float32, bitcast=True)
    scale = tl.where((peak <= old * 127) & (peak >= old * 63), old, tl.div_rn(peak, 96.0))
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    noise = (_noise(row_number, column, key) >> 8).to(tl.float32) / 2**24  # [0, 1)
    levels = tl.floor(values * inverse + noise)
    codes = tl.where(levels == levels, tl.clamp(levels, -127.0, 127.0), 0.0)  # NaN: 0
    tl.store(place + column, codes.to(tl.int8), mask=inside)
    byte = tl.arange(0, 4)
    tl.store(place + dimension + byte, (scale.to(tl.uint32, bitcast=True) >> 8 * byte).to(tl.int8))


@triton.jit
def _load_scale(place):
    """Return the float32 whose four bytes, lowest first, begin at `place`, which need not be aligned."""
    byte = tl.arange(0, 4)
    bits = tl.load(place + byte).to(tl.uint8, bitcast=True).to(tl.uint32) << 8 * byte
    return tl.sum(bits).to(tl.float32, bitcast=True)


@triton.jit
def _noise(row_number, column, key):
    """Return 32 random bits per column, as `noise` of plsc/heads/weights.py."""
    row_key = _mix((row_number >> 32).to(tl.uint32) ^ key)
    row_key = _mix(row_number.to(tl.uint32) ^ row_key)
    return _mix(row_key ^ (column.to(tl.uint32) * 0x9E3779B9))


@triton.jit
def _mix(x):
    """Hash unsigned 32-bit integers; products wrap."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)
