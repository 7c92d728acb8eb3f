import json
import sys
from pathlib import Path

import numpy as np
import pytest

from plsc.errors import DataError
from plsc.evaluate import identification, templates
from plsc.evaluate.identification import identify, retrieval
from plsc.evaluate.report import write_report
from plsc.evaluate.templates import evaluate_templates, read_protocol
from plsc.evaluate.verification import FARS
from plsc.parallel.world import World
from tests.distributed.launch import run_ranks
from tests.distributed.worker import run_worker

SUBJECTS = 24


def pooled_as_written(embeddings, template_of, media_of, weights):
    """IJB: images of a medium first, then the media of the template."""
    templates = {}
    for row, template, medium, weight in zip(embeddings, template_of, media_of, weights, strict=True):
        templates.setdefault(template, {}).setdefault(medium, []).append(row.astype(np.float64) * weight)
    return {
        template: np.mean([np.mean(images, axis=0) for images in media.values()], axis=0)
        for template, media in templates.items()
    }


def cosine(one, other):
    """As an exact sum, of unit vectors with the precision of `identify`."""
    units = [np.rint(x / (np.linalg.norm(x) or 1) * 2**26).astype(int).tolist() for x in (one, other)]
    return sum(a * b for a, b in zip(*units, strict=True)) / 2**52


def write_protocol(folder, seed=0, weighted=False):
    """Write a small IJB-C: templates of one image and more, media of several images, half of them probes."""
    rng = np.random.default_rng(seed)
    rows, subject_of = [], {}
    for template in rng.permutation(4 * SUBJECTS) * 3 + 5:
        subject_of[template] = int(rng.integers(SUBJECTS))
        for medium in rng.integers(0, 4, rng.integers(1, 6)):
            rows.append((f"{len(rows)}.jpg", template, medium))
    order = rng.permutation(len(rows))  # images of a template need not be next to each other
    rows = [rows[index] for index in order]
    (folder / "ijbc_face_tid_mid.txt").write_text("".join("{} {} {}\n".format(*row) for row in rows))
    enrolled = {subject: template for template, subject in subject_of.items()}  # one template each
    halves = {"G1": range(SUBJECTS // 2), "G2": range(SUBJECTS // 2, SUBJECTS)}
    probes = sorted(set(subject_of) - set(enrolled.values()))
    lists = {f"gallery_{name}": [enrolled[s] for s in half if s in enrolled] for name, half in halves.items()}
    for name, listed in {**lists, "probe_mixed": probes}.items():
        lines = [f"{template},{subject_of[template]},x.jpg\n" for template in listed]
        (folder / f"ijbc_1N_{name}.csv").write_text("TEMPLATE_ID,SUBJECT_ID,FILENAME\n" + "".join(lines))
    pairs = [(one, other) for one in enrolled.values() for other in probes]
    lines = [f"{one} {other} {int(subject_of[one] == subject_of[other])}\n" for one, other in pairs]
    (folder / "ijbc_template_pair_label.txt").write_text("".join(lines))
    weights = rng.integers(1, 4, len(rows)) / 4 if weighted else np.ones(len(rows))
    if weighted:
        scored = [f"{row[0]} {'0 ' * 10}{weight}\n" for row, weight in zip(rows, weights, strict=True)]
        (folder / "ijbc_name_5pts_score.txt").write_text("".join(scored))
    # Small integers: many templates are equal, and some are zero.
    embeddings = rng.integers(-1, 2, (len(rows), 3)).astype(np.float32)
    return embeddings, rows, weights, subject_of, pairs, lists, probes


@pytest.mark.parametrize(("weighted", "chunk"), [(False, 8192), (True, 3)])
def test_rates_equal_the_protocol_as_written(tmp_path, monkeypatch, weighted, chunk):
    monkeypatch.setattr(templates, "_CHUNK", chunk)
    embeddings, rows, weights, subject_of, pairs, lists, probes = write_protocol(tmp_path, 1, weighted)
    result = evaluate_templates(embeddings, read_protocol(tmp_path))
    _, template_of, media_of = zip(*rows, strict=True)
    pooled = pooled_as_written(embeddings, template_of, media_of, weights)

    scores = np.array([cosine(pooled[one], pooled[other]) for one, other in pairs])
    same = np.array([subject_of[one] == subject_of[other] for one, other in pairs])
    for far in FARS:
        rates = [
            np.mean(scores[same] >= threshold)
            for threshold in [*np.unique(scores), 2]
            if np.mean(scores[~same] >= threshold) <= far
        ]
        assert result.verification.tar_at_far[far] == pytest.approx(max(rates))
    assert result.verification.unresolved_fars == tuple(far for far in FARS if 1 / (~same).sum() > far)

    found = {"ranks": [], "tpir": []}
    for name, gallery in lists.items():
        enrolled = {subject_of[template]: pooled[template] for template in gallery}
        ranks, mates, tops = [], [], []
        for probe in probes:
            searched = {s: cosine(pooled[probe], vector) for s, vector in enrolled.items()}
            mate = searched.pop(subject_of[probe], None)
            if mate is None:
                tops.append(max(searched.values()))
            else:
                mates.append(mate)
                ranks.append(1 + sum(score >= mate for score in searched.values()))
        limit = sorted(tops, reverse=True)[int(0.1 * len(tops))]  # this one is not accepted any more
        found["ranks"].append(ranks)
        found["tpir"].append(np.mean(np.array(mates) > limit))
        assert result.identification.galleries[name.removeprefix("gallery_")].ranks.tolist() == ranks
    for k in (1, 5, 10):
        expected = np.mean([np.mean(np.array(ranks) <= k) for ranks in found["ranks"]])
        assert getattr(result.identification, f"rank{k}") == pytest.approx(expected)
    assert result.identification.tpir_at_fpir == {0.1: pytest.approx(np.mean(found["tpir"]))}
    assert result.weighted == weighted
    assert result.media == len({(template, medium) for _, template, medium in rows})


def as_insightface(galleries, probes, fpir):
    """Rank-1 and TPIR as pull request 1739 describes them; galleries and probes: (subjects, unit vectors)."""
    subjects, vectors = probes
    tpirs, hits = [], 0
    for enrolled, enrolled_vectors in galleries:
        tops, found = [], []
        for subject, vector in zip(subjects, vectors, strict=True):
            scores = enrolled_vectors @ vector
            is_mate = np.array(enrolled) == subject
            if is_mate.any():
                mate, other = scores[is_mate][0], scores[~is_mate].max()
                found.append((mate > other, mate))
            else:
                tops.append(scores.max())
        threshold = sorted(tops, reverse=True)[max(int(len(tops) * fpir) - 1, 0)]
        hits += sum(first for first, _ in found)
        tpirs.append(sum(first and mate > threshold for first, mate in found) / len(found))
    return hits / len(subjects), sum(tpirs) / len(tpirs)


@pytest.mark.parametrize(("seed", "subjects", "fpirs"), [(0, 24, [0.1]), (2, 180, [0.1, 0.01])])
def test_rates_as_insightface_equal_plain_code_of_its_definition(
    tmp_path, monkeypatch, seed, subjects, fpirs
):
    monkeypatch.setattr(sys.modules[__name__], "SUBJECTS", subjects)
    *_, rows, weights, subject_of, _, lists, probes = write_protocol(tmp_path, seed, weighted=True)
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(SUBJECTS, 16))
    subject_of_row = [subject_of[template] for _, template, _ in rows]
    embeddings = (centres[subject_of_row] + 1.5 * rng.normal(size=(len(rows), 16))).astype(np.float32)
    found = evaluate_templates(embeddings, read_protocol(tmp_path)).identification
    _, template_of, media_of = zip(*rows, strict=True)
    pooled = pooled_as_written(embeddings, template_of, media_of, weights)
    sides = [
        ([subject_of[t] for t in listed], np.array([pooled[t] / np.linalg.norm(pooled[t]) for t in listed]))
        for listed in (*lists.values(), probes)
    ]
    assert list(found.tpir_at_fpir) == fpirs
    for fpir in fpirs:
        rank1, tpir = as_insightface(sides[:-1], sides[-1], fpir)
        assert 0.01 < tpir < 0.99
        assert found.insightface["rank-1"] == pytest.approx(rank1)
        assert found.insightface[f"TPIR at FPIR {fpir:g}"] == pytest.approx(tpir)
        assert found.insightface[f"TPIR at FPIR {fpir:g}"] <= found.tpir_at_fpir[fpir]


def test_report_has_both_protocols(tmp_path):
    embeddings, *_ = write_protocol(tmp_path, 3)
    result = evaluate_templates(embeddings, read_protocol(tmp_path))
    report = write_report(tmp_path / "report", "Templates", [result.section("IJB-C")]).read_text()
    assert "| 1:N | mean | insightface | G1 | G2 |" in report
    values = json.loads((tmp_path / "report/report.json").read_text())["IJB-C"]
    assert values.items() >= result.as_dict().items()
    assert len(list((tmp_path / "report").glob("IJB-C_*.png"))) == 2
    assert all(rate in result.summary() for rate in ("1:1 TAR", "1:N rank-1"))


def test_unusable_embeddings_and_a_gallery_without_searched_subjects_raise_an_error(tmp_path):
    embeddings, *_, lists, _ = write_protocol(tmp_path)
    infinite = embeddings.copy()
    infinite[17, 1] = np.inf
    with pytest.raises(DataError, match="image 17"):
        evaluate_templates(infinite, read_protocol(tmp_path))
    lines = [f"{template},{900 + template}\n" for template in lists["gallery_G2"]]
    (tmp_path / "ijbc_1N_gallery_G2.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n" + "".join(lines))
    with pytest.raises(DataError, match="gallery G2"):
        evaluate_templates(embeddings, read_protocol(tmp_path))


def save_results(folder, world):
    """Save what the ranks compute from the files of a folder to FOLDER/RANKS-RANK.npz."""
    data = np.load(folder / "data.npz")
    gallery, labels = data["gallery"], data["gallery_labels"]
    found = identify(gallery, labels, data["probes"], data["probe_labels"], world)
    assert found.non_mated == 2
    pooled = evaluate_templates(data["images"], read_protocol(folder), world)
    searched = retrieval(gallery, labels, world)
    np.savez(
        folder / f"{world.size}-{world.rank}.npz",
        ranks=found.ranks,
        mate_scores=found.mate_scores,
        top_scores=found.top_scores,
        retrieval=searched.values,
        values=repr([result.as_dict() for result in (found, pooled, searched)]),
    )


def main():
    identification._CHUNK = templates._CHUNK = 7
    identification._CELLS = 20
    world = World.from_environment(device="cpu", timeout_seconds=60)
    save_results(Path(sys.argv[1]), world)
    world.close()


@pytest.mark.slow
def test_results_are_identical_on_several_ranks(tmp_path):
    images, *_ = write_protocol(tmp_path, 6)
    rng = np.random.default_rng(6)
    np.savez(
        tmp_path / "data.npz",
        images=images,
        gallery=rng.integers(-2, 3, (90, 5)).astype(np.float32),
        gallery_labels=rng.integers(-1, 12, 90),
        probes=rng.normal(size=(50, 5)).astype(np.float32),
        probe_labels=np.append(rng.integers(0, 12, 48), [90, 91]),  # fewer non-mated searches than ranks
    )
    run_ranks(__file__, 4, str(tmp_path))
    save_results(tmp_path, World.single())
    alone = np.load(tmp_path / "1-0.npz")
    for rank in range(4):
        stored = np.load(tmp_path / f"4-{rank}.npz")
        assert all(np.array_equal(stored[name], alone[name]) for name in alone.files)


IMAGES = "1.jpg 7 100\n2.jpg 7 100\na b/3.jpg 7 101\n4.jpg 2 5\n5.jpg 30 5\n6.jpg 31 6\n"
PAIRS = "7 2 0\n30 7 1\n2 31 1\n"
HEADER = "TEMPLATE_ID,SUBJECT_ID,FILENAME,FACE_X,FACE_Y,FACE_WIDTH,FACE_HEIGHT\n"
FILES = {
    "ijbc_face_tid_mid.txt": IMAGES,
    "ijbc_template_pair_label.txt": PAIRS,
    "ijbc_1N_gallery_G1.csv": HEADER + "7,40,img/1.jpg,1,2,3,4\n7,40,img/2.jpg,1,2,3,4\n",
    "ijbc_1N_gallery_G2.csv": HEADER + '2,41,"img/a,b.jpg",1,2,3,4\n',
    "ijbc_1N_probe_mixed.csv": HEADER + "30,40,img/5.jpg,1,2,3,4\n31,41,img/6.jpg,1,2,3,4\n",
}


def write(folder, **changes):
    """Write the meta files; a change names a part of the file name. None: no such file."""
    for name, text in FILES.items():
        for part, changed in changes.items():
            text = changed if part in name else text
        if text is not None:
            (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


WINDOWS = {  # with a byte order mark, CRLF, tabs, and no last line end
    "tid": b"\xef\xbb\xbf" + IMAGES.replace("\n", "\r\n").replace(" 7 ", "\t7\t").encode(),
    "pair": PAIRS.replace("\n", "\r\n").replace(" ", "\t").rstrip(),
    "G1": b"\xef\xbb\xbf" + FILES["ijbc_1N_gallery_G1.csv"].replace("\n", "\r\n").encode(),
}


@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_published_layout(tmp_path, changes):
    found = read_protocol(write(tmp_path, **changes))
    assert found.name == "ijbc"
    assert found.template_ids.tolist() == [2, 7, 30, 31]
    assert found.templates.tolist() == [1, 1, 1, 0, 2, 3]
    assert found.media.tolist() == [100, 100, 101, 5, 5, 6]
    named = [found.images.name(index).split(" (")[0] for index in range(1, 4)]
    assert named == ["2.jpg", "a b/3.jpg", "4.jpg"]
    assert found.images.path(0) == str(tmp_path / "1.jpg")
    assert found.pairs.tolist() == [[1, 0], [2, 1], [0, 3]]
    assert found.is_same.tolist() == [False, True, True]
    assert sorted(found.galleries) == ["G1", "G2"]
    for members, templates_of, subjects in (
        (found.galleries["G1"], [1], [40]),
        (found.probes, [2, 3], [40, 41]),
    ):
        assert (members.templates.tolist(), members.subjects.tolist()) == (templates_of, subjects)
    assert found.weights is None


def test_images_at_urls_need_an_allowed_prefix(tmp_path):
    write(tmp_path, tid=IMAGES.replace("1.jpg", "s3://faces/1.jpg", 1))
    with pytest.raises(DataError, match="allowed"):
        read_protocol(tmp_path)
    assert read_protocol(tmp_path, allowed=["s3://faces/"]).images.path(0) == "s3://faces/1.jpg"


def test_long_pair_files_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "_BLOCK_BYTES", 64)
    pairs, flags = np.array([2, 7, 30, 31])[np.arange(600).reshape(300, 2) * 7 % 4], np.arange(300) % 2
    lines = [f"{one} {other} {flag}\n" for (one, other), flag in zip(pairs, flags, strict=True)]
    found = read_protocol(write(tmp_path, pair="".join(lines)))
    assert found.template_ids[found.pairs].tolist() == pairs.tolist()
    assert found.is_same.tolist() == (flags == 1).tolist()
    lines[200] = "7 2\n"
    write(tmp_path, pair="".join(lines))
    with pytest.raises(DataError, match=r"label\.txt: .*#201"):
        read_protocol(tmp_path)


def test_only_one_of_the_protocols_is_needed(tmp_path):
    assert read_protocol(write(tmp_path, pair=None)).pairs is None
    (tmp_path / "other").mkdir()
    found = read_protocol(write(tmp_path / "other", gallery=None, probe=None))
    assert (found.galleries, found.probes) == ({}, None)


def test_scores_of_the_detector_are_weights(tmp_path):
    lines = [line.rsplit(" ", 2)[0] for line in IMAGES.splitlines()]
    scores = tmp_path / "ijbc_name_5pts_score.txt"
    scores.write_text("".join(f"{name} {'1.5 ' * 10}0.{i}\n" for i, name in enumerate(lines)))
    assert read_protocol(write(tmp_path)).weights.tolist() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    for text, message in (
        ("".join(f"{name} 0.5\n" for name in lines[::-1]), r"score\.txt:1: .*6\.jpg"),
        (f"{lines[0]} 0.5\n", "1 lines for 6 images"),
        (f"{lines[0]} nan\n", r"score\.txt:1: .*nan"),
    ):
        scores.write_text(text)
        with pytest.raises(DataError, match=message):
            read_protocol(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tid": None}, "face_tid_mid.txt"),
        ({"tid": ""}, "no images"),
        ({"tid": "1.jpg 7 100\n2.jpg 7\n"}, r"mid\.txt:2: "),
        ({"tid": "../1.jpg 7 100\n"}, r"mid\.txt:1: .*outside"),
        ({"tid": "x" * 20000 + " 7 100\n"}, r"mid\.txt:1 "),
        ({"pair": None, "gallery": None, "probe": None}, "ijbc_template_pair_label.txt"),
        ({"pair": "7 2 1\n"}, "same and of different subjects"),
        ({"pair": "7 2\n0 7 2 1\n"}, r"label\.txt: .*#1"),
        ({"pair": "7 2 1\n7 8 0\n"}, r"label\.txt: .*#2: '7 8 0'"),
        ({"pair": b"7 2 1\n\x00\xff 2 0\n"}, r"label\.txt: .*#2"),
        ({"G1": "7,40,img/1.jpg\n"}, r"G1\.csv:1: "),
        ({"G2": HEADER + "2\n"}, r"G2\.csv:2: .*'2'"),
        ({"G2": HEADER + "3,1,\n"}, r"G2\.csv:2: .*no images"),
        ({"G2": HEADER + "2,1,\n2,5,\n"}, r"G2\.csv:3: .*another subject"),
        ({"probe": None}, "probe_mixed.csv"),
    ],
)
def test_bad_files_raise_an_error_with_the_line(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        read_protocol(write(tmp_path, **changes))


def test_two_datasets_in_one_folder_raise_an_error(tmp_path):
    (write(tmp_path) / "ijbb_face_tid_mid.txt").write_text(IMAGES)
    with pytest.raises(DataError, match="ijbb"):
        read_protocol(tmp_path)


if __name__ == "__main__":
    run_worker(main)
