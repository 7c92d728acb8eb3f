import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plsc.errors import DataError
from plsc.evaluate.curves import area_under, equal_error_rate, roc_curve, tar_at_far
from plsc.evaluate.report import write_report
from plsc.evaluate.verification import read_pair_list, scores, verify, wilson_interval


def naive_accuracy(embeddings, is_same, folds):
    """The protocol with loops over pairs: mean, standard deviation, mean threshold."""
    distances = []
    for first, second in zip(embeddings[::2], embeddings[1::2], strict=True):
        first, second = first.astype(float), second.astype(float)
        difference = first / np.sqrt(first @ first) - second / np.sqrt(second @ second)
        distances.append(sum(d * d for d in difference))
    remaining, parts = list(range(len(is_same))), []
    for fold in range(folds):
        size = len(is_same) // folds + (fold < len(is_same) % folds)
        parts.append(remaining[:size])
        remaining = remaining[size:]

    def accuracy(threshold, pairs):
        return sum((distances[p] < threshold) == is_same[p] for p in pairs) / len(pairs)

    accuracies, thresholds = [], []
    for test in parts:
        train = [p for part in parts if part is not test for p in part]
        best, best_accuracy = None, -1.0
        for threshold in np.arange(0, 4, 0.01):
            found = accuracy(threshold, train)
            if found > best_accuracy:
                best, best_accuracy = threshold, found
        accuracies.append(accuracy(best, test))
        thresholds.append(best)
    return np.mean(accuracies), np.std(accuracies), np.mean(thresholds)


def naive_tar(cosines, is_same, far):
    """Try all relevant thresholds."""
    best = 0.0
    positives, negatives = cosines[is_same], cosines[~is_same]
    for threshold in [*cosines, np.inf]:
        if sum(negatives >= threshold) / len(negatives) <= far:
            best = max(best, sum(positives >= threshold) / len(positives))
    return best


def some_pairs(pairs, noise, seed, size=8):
    generator = np.random.default_rng(seed)
    is_same = generator.random(pairs) < 0.4
    is_same[:2] = True, False
    first = generator.normal(size=(pairs, size))
    other = np.where(is_same[:, None], first, generator.normal(size=(pairs, size)))
    second = other + noise * generator.normal(size=(pairs, size))
    embeddings = np.stack([first, 3 * second], axis=1).reshape(2 * pairs, size)
    return embeddings.astype(np.float32), is_same


@pytest.mark.parametrize(
    ("pairs", "folds", "noise"), [(60, 10, 0.1), (47, 10, 1.0), (10, 10, 3.0), (23, 2, 1.0)]
)
def test_accuracy_equals_the_protocol_with_loops(pairs, folds, noise):
    embeddings, is_same = some_pairs(pairs, noise, seed=pairs)
    result = verify(embeddings, is_same, folds)
    naive = naive_accuracy(embeddings, is_same, folds)
    assert (result.accuracy, result.accuracy_std, result.threshold) == pytest.approx(naive)
    assert result.threshold_cosine == pytest.approx(1 - naive[2] / 2)


# few distinct scores, so that ties are common
SCORED = (
    st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=40)
    .filter(lambda pairs: len({same for _, same in pairs}) == 2)
    .map(lambda pairs: (np.array([score / 4 for score, _ in pairs]), np.array([same for _, same in pairs])))
)


@given(SCORED, st.sampled_from([0.001, 0.1, 0.25, 0.29, 1 / 3, 0.5, 0.7, 1.0]))
def test_tar_at_far_is_the_maximum_over_all_thresholds_and_auc_a_probability(scored, far):
    cosines, is_same = scored
    assert tar_at_far(*roc_curve(cosines, is_same), far) == pytest.approx(naive_tar(cosines, is_same, far))
    # That a same pair scores higher than a different one
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p in cosines[is_same] for n in cosines[~is_same]]
    assert area_under(*roc_curve(cosines, is_same)) == pytest.approx(np.mean(wins))


def test_tar_at_far_uses_all_allowed_false_accepts():
    # 0.29 * 100 is 28.999999999999996 in binary
    cosines = np.append(np.arange(100, 0, -1) / 100, 0.715)
    is_same = np.append(np.zeros(100, bool), True)
    assert tar_at_far(*roc_curve(cosines, is_same), 0.29) == 1.0
    assert tar_at_far(*roc_curve(cosines, is_same), 0.28) == 0.0


def test_scores_are_cosines_of_pairs_across_chunks():
    embeddings, _ = some_pairs(9000, 1.0, seed=1)
    first, second = embeddings[::2].astype(float), embeddings[1::2].astype(float)
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    steps = scores(embeddings) * 2**20
    assert np.array_equal(steps, np.rint(steps))
    assert abs(steps - 2**20 * (first * second).sum(axis=1) / lengths).max() <= 0.5 + 1e-6


def test_results_depend_only_on_the_angles():
    # Small integers: many cosines are equal, many distances are multiples of 0.01 such as 0.5.
    generator = np.random.default_rng(0)
    embeddings = np.array([[3, 4, 0], [4, 3, 0], [1, 2, 2], [0, 0, 5], [0, 0, 0]])[
        generator.integers(0, 5, 2000)
    ]
    is_same = generator.random(1000) < 0.4
    expected = verify(embeddings, is_same)
    assert len(set(expected.cosines)) == len(set(expected.cosines.round(4)))
    scaled = embeddings[:, [2, 0, 1]] * generator.uniform(0.001, 1000, (2000, 1))
    found = verify(scaled, is_same).as_dict()
    assert {**found, "mean_norm": 0} == {**expected.as_dict(), "mean_norm": 0}


def test_result_lists_unresolved_fars():
    embeddings, is_same = some_pairs(100, 0.5, seed=0)
    is_same[:] = np.arange(100) < 5
    result = verify(embeddings, is_same)
    assert result.unresolved_fars == (0.01, 0.001, 0.0001, 0.00001, 0.000001)
    assert "95 different pairs" in result.warning()
    assert result.tar_at_far[0.01] == naive_tar(scores(embeddings), is_same, 0)


@given(SCORED, st.sampled_from([0.1, 0.01]))
def test_the_threshold_of_a_far_gives_its_tar(scored, far):
    cosines, is_same = scored
    angles = np.arccos(cosines)
    embeddings = np.zeros((2 * len(cosines), 2))
    embeddings[::2, 0] = 1
    embeddings[1::2] = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    result = verify(embeddings, is_same, folds=2)
    threshold = result.threshold_at_far[far]
    accepted = result.cosines >= (np.inf if threshold is None else threshold)
    assert result.tar_at_far[far] == accepted[is_same].mean()
    assert accepted[~is_same].mean() <= far
    low, high = result.tar_intervals[far]
    assert 0 <= low <= result.tar_at_far[far] <= high <= 1


def test_intervals_are_those_of_wilson():
    # The interval holds the rates p whose normal test accepts the count: |k - n p| <= z sqrt(n p (1 - p)).
    rates = np.linspace(0, 1, 200_001)
    for successes, trials in ((0, 10), (3, 10), (10, 10), (299, 300), (1, 3000)):
        accepted = abs(successes - trials * rates) <= 1.959964 * np.sqrt(trials * rates * (1 - rates)) + 1e-9
        expected = rates[accepted][[0, -1]]
        assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-5)


@given(SCORED)
def test_eer_is_where_the_roc_curve_crosses_the_diagonal(scored):
    cosines, is_same = scored
    points = []
    for threshold in [np.inf, *sorted(set(cosines), reverse=True)]:
        accepted = cosines >= threshold
        points.append((accepted[~is_same].mean(), 1 - accepted[is_same].mean()))
    for (far, frr), (next_far, next_frr) in itertools.pairwise(points):
        if far <= frr and next_far >= next_frr:
            share = (frr - far) / ((frr - far) + (next_far - next_frr))
            expected = far + share * (next_far - far)
            break
    far, tar = roc_curve(cosines, is_same)
    assert equal_error_rate(far, tar) == pytest.approx(expected)


def test_pairs_are_rows_of_the_embeddings():
    embeddings, is_same = some_pairs(60, 1.0, seed=4)
    order = np.random.default_rng(0).permutation(120)
    rows = np.argsort(order).reshape(60, 2)
    expected, found = verify(embeddings, is_same), verify(embeddings[order], is_same, pairs=rows)
    assert found.as_dict() == expected.as_dict()


def test_the_report_has_the_values_and_the_curve(tmp_path):
    embeddings, is_same = some_pairs(60, 1.0, seed=4)
    result = verify(embeddings, is_same)
    path = write_report(tmp_path, "Report", [result.section("my pairs")])
    assert "my_pairs_roc.png" in path.read_text()
    values = json.loads((tmp_path / "report.json").read_text())["my pairs"]
    assert values.pop("choices")
    assert values == result.as_dict()
    assert values["mean_norm"] == pytest.approx(np.linalg.norm(embeddings, axis=1).mean())


def test_invalid_verification_input_raises():
    embeddings, is_same = some_pairs(20, 0.5, seed=0)
    infinite = embeddings.copy()
    infinite[7, 3] = np.inf
    for rows, same, message in [
        (embeddings[:18], is_same[:9], "10 folds"),
        (embeddings, np.ones(20, bool), "only same"),
        (np.empty((0, 4)), np.empty(0, bool), "no pairs"),
        (embeddings, is_same[:19], "shape"),
        (infinite, is_same, "pair 3"),
    ]:
        with pytest.raises(DataError, match=message):
            verify(rows, same)


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png", "my face.png", "Al_Gore/Al_Gore_0001.png", "Al_Gore/Al_Gore_0012.png",
                 "Bo/Bo_0003.png"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def write(folder, content):
    path = folder / "list.txt"
    path.write_bytes(content)
    return path


def read(folder, content):
    """Return the content of both images and the flag of each pair."""
    found = read_pair_list(write(folder, content))
    images = [found.images[index][0].decode() for index in range(len(found.images))]
    assert len(set(images)) == len(images)
    pairs = found.pairs.tolist()
    return [(images[a], images[b], flag) for (a, b), flag in zip(pairs, found.is_same.tolist(), strict=True)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfa.png b.png 0\r\n\r\n  a.png   b.png  1 \n", "ab0 ab1"),
        (b"my face.png\ta.png\t1\nb.png b.png 1\nAl_Gore/../a.png b.png 0", "ma1 bb1 ab0"),
        (b"a.png,b.png,True\na.png , my face.png, FALSE\n", "ab1 am0"),
        (b"path1,path2,is_same\r\na.png,b.png,1\r\na.png,my face.png,-1\r\n", "ab1 am0"),
        (b'left;right;same\n"a.png";"b.png";"1"\na.png;"my face.png";0\n', "ab1 am0"),
        (b"a.png b.png true\na.png\tmy face.png\t-1\n", "ab1 am0"),
    ],
)
def test_lines_are_two_paths_and_a_flag_with_any_separator(folder, content, expected):
    assert " ".join(f"{one[0]}{other[0]}{flag:d}" for one, other, flag in read(folder, content)) == expected


@pytest.mark.parametrize("header", [b"1\t1", b"1"])
def test_the_layout_of_lfw_finds_the_suffix_of_the_images(folder, header):
    assert read(folder, header + b"\nAl_Gore\t1\t12\nAl_Gore\t12\tBo\t3\n") == [
        ("Al_Gore/Al_Gore_0001.png", "Al_Gore/Al_Gore_0012.png", True),
        ("Al_Gore/Al_Gore_0012.png", "Bo/Bo_0003.png", False),
    ]


def test_the_layout_of_lfw_finds_suffixes_in_upper_case(tmp_path):
    (tmp_path / "Bo").mkdir()
    for number in (1, 2):
        (tmp_path / f"Bo/Bo_000{number}.JPG").write_bytes(b"%d" % number)
    assert read(tmp_path, b"1\nBo\t1\t2\nBo\t2\tBo\t1\n") == [("1", "2", True), ("2", "1", False)]


def test_images_may_be_in_another_folder_and_are_named_with_their_first_line(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("lists")
    found = read_pair_list(write(elsewhere, b"a.png b.png 0\nb.png a.png 0\n"), folder)
    assert [found.images.name(index) for index in (0, 1)] == ["a.png (list.txt:1)", "b.png (list.txt:1)"]
    assert found.images.path(1) == str(folder / "b.png")
    assert np.array_equal(found.pairs, [[0, 1], [1, 0]])
    (folder / "b.png").unlink()
    with pytest.raises(DataError, match=r"^b\.png \(list\.txt:1\): .*missing"):
        found.images[1]
    with pytest.raises(DataError, match=r"none\.txt"):
        read_pair_list(folder / "none.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 pairs"),
        (b"a.png b.png\n", r"list\.txt:1: .*'a\.png b\.png'"),
        (b"a.png b.png 1\nmy face.png b.png 1\n", r"list\.txt:2: .*blank"),
        (b"a.png b.png 1\n\na.png b.png 2\n", r"list\.txt:3: .*'a\.png b\.png 2'"),
        ("a.png b.png 1\n".encode("utf-16"), "UTF-16"),
        (b"a.png b.png 1\na.png c.png 1\n", r"c\.png \(list\.txt:2\): "),
        (b"a.png /etc/passwd 1\n", r"/etc/passwd \(list\.txt:1\): .*not an image"),
        (b"a.png ../a.png 1\n", r"list\.txt:1: .*outside"),
        (b"a.png http://host/b.png 1\n", r"list\.txt:1: .*allowed"),
        (b"a.png " + b"b" * 100_000, r"list\.txt:1 "),
        (b"1\t2\nAl_Gore\t1\t12\n", "1 pairs"),
        (b"1\t1\nAl_Gore\t1\tx\n", r"list\.txt:2: "),
    ],
)
def test_a_bad_list_is_an_error_that_names_file_and_line(folder, content, message):
    with pytest.raises(DataError, match=message) as caught:
        read_pair_list(write(folder, content)).images[1]
    assert "\n" not in str(caught.value)


def test_a_folder_that_a_list_names_is_beside_the_list_and_has_images(tmp_path, monkeypatch):
    for name, text in (
        ("list/sub/a", b"\xff\xd8\xff right"),
        ("sub/a", b"\xff\xd8\xff wrong"),
        ("home/a", b"SECRET"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(text)
    monkeypatch.chdir(tmp_path)
    images = read_pair_list(write(tmp_path / "list", b"# images: sub\na a 0\n")).images
    assert images[0][0] == b"\xff\xd8\xff right"
    assert images.name(0) == "a (list.txt:2)"
    images = read_pair_list(write(tmp_path / "list", f"# images: {tmp_path}/home\na a 0\n".encode())).images
    with pytest.raises(DataError, match="not an image"):
        images[0]
    (problem,) = images.read_many(np.array([0]))
    assert isinstance(problem, DataError)
    assert "SECRET" not in str(problem)
