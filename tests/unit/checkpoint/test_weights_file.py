"""Class weights in a file: the same as in memory, bit for bit, and undone to the state of a checkpoint."""

import contextlib
import errno
import itertools
import json
import os
import resource
import zlib

import pytest
import torch

from plsc.checkpoint import weights_file as module
from plsc.checkpoint.rollback import mark_of
from plsc.checkpoint.weights_file import WeightsFile, opened_at
from plsc.errors import CheckpointError, DataError, OptionError, TrainingError
from plsc.heads import RowAdagrad, Sampling, ShardedHead, build_margin
from plsc.parallel.world import World
from tests.devices import GPU

CLASSES, DIMENSION = 330, 24  # 11 pages, the last one with 10 classes
PAGES = Sampling(0.3, in_pages=True)
SAVED = mark_of(2, "run"), CheckpointError


def make_head(folder=None, sampling=PAGES, **settings):
    settings = {"row_dtype": "int8", "seed": 4, **settings}
    file = None if folder is None else WeightsFile(folder, range(CLASSES), DIMENSION, 4)
    return ShardedHead(CLASSES, DIMENSION, build_margin("arcface"), sampling=sampling, file=file, **settings)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, DIMENSION, generator=generator)
    return x.requires_grad_(), torch.randint(CLASSES, (40,), generator=generator)


def train(head, rows, steps, micro_batches=1):
    losses = []
    for step in steps:
        for part in range(micro_batches):
            x, y = batch(10 * step + part)
            output = head(x, y)
            output.loss.backward()
            losses.append((output.loss.item(), x.grad.sum().item()))
        rows.step()
    return losses


def contents(head):
    """Return weights and states of all classes."""
    everything = slice(0, CLASSES)
    return head.file.read(everything).clone(), head.file.read(everything, "sum_of_squares").clone()


def saved_run(opened, steps=2, **settings):
    """Train a head in a file, and publish a checkpoint; return the head, and its optimizer."""
    head, rows = opened(**settings)
    train(head, rows, range(steps))
    head.file.begin(mark_of(steps, "run"))
    head.file.forget(mark_of(steps, "run"))
    return head, rows


@pytest.fixture
def opened(tmp_path):
    """Return a function that makes a head in a file, with its optimizer; all are closed at the end."""
    heads = []

    def make(mark=None, folder=tmp_path / "rows", **settings):
        head = make_head(folder, **settings)
        heads.append(head)
        rows = RowAdagrad(head, lr=0.3)
        if mark is not None:
            head.file.open(mark)
            head.step = int(mark[:12])
        return head, rows

    yield make
    for head in heads:
        head.file.close()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_file_gives_the_bits_of_memory(opened, micro_batches):
    memory = make_head()
    rows = RowAdagrad(memory, lr=0.3)
    head, of_file = opened()
    assert train(memory, rows, range(6), micro_batches) == train(head, of_file, range(6), micro_batches)
    weight, states = contents(head)
    assert torch.equal(weight, memory.weight)
    assert torch.equal(states, rows.state[memory.weight]["sum_of_squares"])
    x, _ = batch(99)
    for found, expected in zip(head.topk(x, 4), memory.topk(x, 4), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(head.classify(x)[1], memory.classify(x)[1])
    head.eval(), memory.eval()
    torch.testing.assert_close(head(*batch(5)).loss, memory(*batch(5)).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_device_computes_with_pages_of_a_file(opened, device):
    losses = []
    for make in (lambda: (head := make_head().to(device), RowAdagrad(head, lr=0.3)), opened):
        head, rows = make()
        found = []
        for step in range(3):
            x, y = batch(step)
            loss = head(x.detach().to(device).requires_grad_(), y.to(device)).loss
            loss.backward()
            rows.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_an_update_that_is_skipped_changes_nothing(opened):
    head, rows = opened()
    train(head, rows, range(2))
    before = contents(head)
    head(*batch(7)).loss.backward()
    rows.skip()
    assert all(map(torch.equal, contents(head), before))
    memory = make_head()
    in_memory = RowAdagrad(memory, lr=0.3)
    train(memory, in_memory, range(2))
    memory(*batch(7)).loss.backward()
    in_memory.skip()
    assert train(head, rows, range(3, 5)) == train(memory, in_memory, range(3, 5))


@pytest.mark.parametrize("checkpoint", [0, 1, 2])
def test_opening_at_a_checkpoint_undoes_what_came_after_it(opened, checkpoint):
    head, rows = opened()
    states = []
    for k in range(3):
        train(head, rows, [2 * k, 2 * k + 1])
        head.file.begin(mark_of(2 * k + 2, "run"))
        states.append(contents(head))
        head.file.forget(mark_of(2, "run"))
    later = train(head, rows, [6, 7])
    head.file.close()
    again, rows = opened(mark_of(2 * checkpoint + 2, "run"))
    assert all(map(torch.equal, contents(again), states[checkpoint]))
    remaining = train(again, rows, range(2 * checkpoint + 2, 8))
    assert remaining[-2:] == later


def test_opening_finishes_an_undo_that_was_killed(opened, monkeypatch):
    head, rows = saved_run(opened, 3)
    expected = contents(head)
    train(head, rows, range(3, 6))
    head.file.close()

    class Killed(BaseException):
        pass

    move_blocks = module.move_blocks

    def dying(handle, is_write, numbers, blocks):
        if not is_write:
            return move_blocks(handle, is_write, numbers, blocks)
        move_blocks(handle, is_write, numbers[::2].copy(), blocks[::2].copy())
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(module, "move_blocks", dying)
        broken = make_head(head.file.folder)
        RowAdagrad(broken)
        with pytest.raises(Killed):
            broken.file.open(mark_of(3, "run"))
    again, _ = opened(mark_of(3, "run"))
    assert all(map(torch.equal, contents(again), expected))


def test_a_block_that_was_cut_off_is_ignored_and_a_damaged_one_refused(opened):
    head, rows = opened()
    train(head, rows, range(3))
    head.file.begin(mark_of(3, "run"))
    expected = contents(head)
    train(head, rows, [3])
    head.file.close()
    journal = head.file.folder / f"journal-{mark_of(3, 'run')}"
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:-5])
    again, _ = opened(mark_of(3, "run"))
    assert all(map(torch.equal, contents(again), expected))
    again.file.close()
    journal.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    with pytest.raises(CheckpointError, match=r"journal-0+3-run .* damaged"):
        opened(mark_of(3, "run"))


def change_header(head, **changes):
    path = head.file.folder / "header.json"
    header = {**json.loads(path.read_text()), **changes}
    header.pop("crc32")
    path.write_text(json.dumps({**header, "crc32": zlib.crc32(json.dumps(header).encode())}))


def flip_bit_of_header(head):
    path = head.file.folder / "header.json"
    path.write_text(path.read_text().replace("330]", "331]"))


@pytest.mark.parametrize(
    ("spoil", "mark", "error", "message"),
    [
        (lambda _: None, mark_of(4, "other"), CheckpointError, "step 2, .* step 4"),
        (lambda _: None, None, OptionError, "step 2"),
        (lambda head: os.truncate(head.file.folder / "pages", 100), *SAVED, "pages .* 11264 bytes"),
        (lambda head: os.truncate(head.file.folder / "header.json", 3 << 30), *SAVED, "header.json"),
        (flip_bit_of_header, *SAVED, "header.json .* damaged"),
        (lambda head: change_header(head, format=1), *SAVED, "format 2"),
        (lambda head: change_header(head, classes=[0, 165]), *SAVED, r"classes \[0, 165\], .* \[0, 330\]"),
        (lambda head: change_header(head, boot="earlier"), *SAVED, "restarted"),
    ],
)
def test_files_that_do_not_fit_are_refused(opened, spoil, mark, error, message):
    head, _ = saved_run(opened)
    head.file.close()
    spoil(head)
    again = make_head(head.file.folder)
    RowAdagrad(again)
    with pytest.raises(error, match=message):
        again.file.open(mark)


PAGE_BYTES = 32 * (DIMENSION + 8)
TABLE = 24 + 4 * 11  # bytes of a journal before its blocks


def flip_bit(pages):
    pages[-700] ^= 4


def swap_pages(pages):
    first = pages[:PAGE_BYTES]
    pages[:PAGE_BYTES] = pages[PAGE_BYTES : 2 * PAGE_BYTES]
    pages[PAGE_BYTES : 2 * PAGE_BYTES] = first


@pytest.mark.parametrize("damage", [flip_bit, swap_pages])
def test_a_damaged_page_is_never_used(opened, damage):
    head, _ = saved_run(opened, 8)
    head.file.close()
    path = head.file.folder / "pages"
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    again, rows = opened(mark_of(8, "run"))
    with pytest.raises(CheckpointError, match=r"pages .*page \d+ "):
        train(again, rows, range(8, 16))


@pytest.mark.parametrize(
    "damage",
    [
        lambda journal, other: journal[:-PAGE_BYTES],
        lambda journal, other: journal[:-1] + bytes([journal[-1] ^ 1]),
        lambda journal, other: journal[:TABLE] + bytes([journal[TABLE] + 1]) + journal[TABLE + 1 :],
        lambda journal, other: other,
        lambda journal, other: journal[:20],  # no table
    ],
)
def test_a_journal_that_is_not_whole_and_of_these_files_is_refused_before_a_change(opened, tmp_path, damage):
    mark = mark_of(2, "run")
    for folder in ("rows", "other"):
        head, rows = saved_run(opened, folder=tmp_path / folder)
        train(head, rows, range(2, 5))
        head.file.close()
    path = tmp_path / "rows" / f"journal-{mark}"
    path.write_bytes(damage(path.read_bytes(), (tmp_path / "other" / path.name).read_bytes()))
    before = (tmp_path / "rows" / "pages").read_bytes()
    with pytest.raises(CheckpointError, match="journal"):
        opened(mark)
    assert (tmp_path / "rows" / "pages").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "kind"), [("header.json", "pipe"), ("pages", "link"), (f"journal-{mark_of(2, 'run')}", "link")]
)
def test_pipes_and_links_out_of_the_folder_are_refused(opened, tmp_path, name, kind):
    head, _ = saved_run(opened)
    head.file.close()
    path = (head.file.folder / name).rename(tmp_path / "outside")
    os.mkfifo(head.file.folder / name) if kind == "pipe" else (head.file.folder / name).symlink_to(path)
    with pytest.raises((CheckpointError, TrainingError), match=r"not a regular file|link"):
        opened(mark_of(2, "run"))


@pytest.mark.parametrize("name", ["new", "header.json", "pages", "journal-000000000000-"])
def test_a_link_instead_of_a_new_file_overwrites_nothing_outside(opened, tmp_path, name):
    head, rows = opened()
    train(head, rows, range(2))
    head.file.close()
    content = (head.file.folder / "header.json").read_bytes() + b"\n"
    (tmp_path / "outside").write_bytes(content)
    (head.file.folder / name).unlink(missing_ok=True)
    (head.file.folder / name).symlink_to(tmp_path / "outside")
    again, rows = opened()
    with contextlib.suppress(CheckpointError):  # the header is a link
        train(again, rows, range(2))
    assert (tmp_path / "outside").read_bytes() == content


def test_a_second_failure_in_close_does_not_hide_the_first_error(opened):
    head, rows = opened()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail():
        with opened_at(head.file, World.single("cpu"), None):
            train(head, rows, range(2))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk: no write succeeds
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            fail()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    opened()[0].file.open()  # the lock was released


@pytest.mark.parametrize("is_saving", [False, True])
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(opened, is_saving):
    head, rows = opened()
    losses = train(head, rows, range(2))
    if is_saving:
        head.file.begin(mark_of(2, "killed"))  # and the checkpoint was never published
        train(head, rows, [2])
    head.file.close()
    again, rows = opened()
    assert train(again, rows, range(2)) == losses
    assert [path.name for path in again.file.folder.glob("journal-*")] == ["journal-000000000000-"]


def test_a_folder_of_other_files_or_of_a_run_that_lives_is_refused(opened, monkeypatch, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    with pytest.raises(OptionError, match="other files"):
        opened(folder=tmp_path / "photos")[0].file.open()
    head, _ = opened()
    head.file.open()
    monkeypatch.setattr("time.monotonic", itertools.count(0, 10).__next__)  # nor does it wait for long
    if not (child := os.fork()):
        try:
            make_head(tmp_path / "rows").file.open()
        except DataError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("where", [(os, "pwritev"), (module, "move_blocks")])
def test_a_full_disk_stops_the_run_and_loses_nothing(opened, monkeypatch, where):
    head, rows = saved_run(opened)
    expected = contents(head)
    move_blocks = module.move_blocks

    def full(*arguments):
        if len(arguments) == 4 and not arguments[1]:  # reads
            return move_blocks(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(*where, full)
        with pytest.raises(TrainingError, match="No space left"):
            train(head, rows, range(2, 4))
    with pytest.raises(TrainingError, match="No space left"):
        head.file.begin(mark_of(3, "run"))
    head.file.close()
    again, _ = opened(mark_of(2, "run"))
    assert all(map(torch.equal, contents(again), expected))
