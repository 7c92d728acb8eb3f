"""Packed class names compared with lists of strings."""

import numpy as np
import pytest

from plsc.data.class_names import ClassNames


def listed(names):
    return [names[number] for number in range(len(names))]


@pytest.mark.parametrize("seed", range(3))
def test_class_names_behave_like_a_list_of_strings(seed):
    rng = np.random.default_rng(seed)
    letters = np.array(["a", "Zoë", "/", "字"])
    pool = sorted({"".join(rng.choice(letters, rng.integers(1, 6))) for _ in range(60)})
    plain = list(rng.permutation(pool))[:20]
    for number in rng.choice(20, 4, replace=False):
        plain[number] = ""
    saved = ClassNames.of(plain)
    assert listed(saved) == plain
    wanted = rng.integers(-1, 20, 30)
    assert listed(saved.take(wanted)) == [plain[n] if n >= 0 else "" for n in wanted]
    assert listed(saved.resized(23)) == [*plain, "", "", ""]
    assert listed(saved.resized(7)) == plain[:7]

    own = sorted(rng.choice(pool, 25, replace=False))
    free = [number for number, name in enumerate(plain) if not name]
    expected, behind = [], 20
    for name in own:
        if name in plain:
            expected.append(plain.index(name))
        elif free:
            expected.append(free.pop(0))
        else:
            expected.append(behind)
            behind += 1
    numbers = saved.numbered(ClassNames.of(own))
    assert numbers.tolist() == expected
    both = listed(saved.resized(behind).with_names(ClassNames.of(own), numbers))
    assert [both[number] for number in numbers] == own
    assert all(both[number] == name for number, name in enumerate(plain) if name)


def test_composed_and_decomposed_names_are_equal_and_kept_as_written():
    saved = ClassNames.of(["Zoe\u0301", "", "\uac00", "x"])
    others = ClassNames.of(["x", "Zo\u00e9", "\u1100\u1161", "Zoe"])
    assert saved.numbers_of(others).tolist() == [3, 0, 2, -1]
    numbers = saved.numbered(others)
    assert numbers.tolist() == [3, 0, 2, 1]
    assert listed(saved)[0] == "Zoe\u0301"
    odd = b"\xff\xfe".decode("utf-8", "surrogateescape")  # any bytes of a file name
    assert ClassNames.of(["", odd, odd]).numbered(ClassNames.of([odd])).tolist() == [1]


@pytest.mark.timeout(60)
def test_a_name_of_millions_of_combining_characters_is_compared_in_linear_time():
    long = ClassNames.of(["a" + "\u0301\u0316" * 10**6, "b"])
    others = ClassNames.of(["b", long.text[: long.ends[0]].tobytes().decode()])
    assert long.numbers_of(others).tolist() == [1, 0]
