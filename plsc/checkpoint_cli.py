"""The verbs of ``plsc checkpoint``: each is one entry in VERBS, with its arguments and what it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from plsc.errors import OptionError
from plsc.verbs import Argument, Verb, run_verb

_CHECKPOINT = Argument(
    "checkpoint", str, dataclasses.MISSING, "a checkpoint folder, such as saved_model/5", True
)


def run_verify(checkpoint: str) -> None:
    """Read a whole checkpoint and compare it with its manifest."""
    from plsc.checkpoint.verify import verify

    manifest = verify(checkpoint)
    size = sum(file.bytes for file in manifest.files.values())
    print(f"{checkpoint} is whole: {len(manifest.files)} files, {size} bytes, step {manifest.step}")


def run_import(
    source: str,
    target: str,
    layout: str,
    ranks: int,
    model: str | None,
    emb_size: int | None,
    image_shape: str | None,
    loss_type: str | None,
    class_num: int | None,
    global_batch_size: int | None,
) -> None:
    """Turn weights that another program saved into a checkpoint."""
    from plsc.checkpoint.importers import Network, import_checkpoint

    network = Network(model, emb_size, _read_shape(image_shape))
    imported = import_checkpoint(
        source,
        target,
        layout=layout,
        ranks=ranks,
        network=network,
        loss_type=loss_type,
        class_num=class_num,
        global_batch_size=global_batch_size,
    )
    print("\n".join(imported.lines()))


def _read_shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.strip("[]() ").split(","))
    except ValueError as error:
        raise OptionError(
            f"image_shape is {text!r}; expected channels,height,width, such as 3,112,112"
        ) from error


def _import_arguments() -> list[Argument]:
    missing = dataclasses.MISSING
    return [
        Argument("source", str, missing, "a folder of shards, or a file of weights", True),
        Argument("target", str, missing, "the checkpoint folder to write; must not exist", True),
        Argument("layout", str, "auto", "auto, insightface, plsc1, safetensors or state_dict"),
        Argument("ranks", int, 1, "files to write: the ranks that will train"),
        Argument(
            "model", str, None, "the network, as set_model_name takes it, if the files do not say"
        ),
        Argument("emb_size", int, None, "size of the embedding, if the files do not say"),
        Argument("image_shape", str, None, "channels,height,width, if the files do not say"),
        Argument("loss_type", str, None, "as set_loss_type takes it; by default the layout's own"),
        Argument("class_num", int, None, "number of classes that must be there"),
        Argument(
            "global_batch_size", int, None, "of the run that resumes it; by default 128 a rank"
        ),
    ]


VERBS = {
    "import": Verb(
        "turn weights of insightface, PLSC 0.1, safetensors or torch.save into a checkpoint",
        _import_arguments,
        run_import,
    ),
    "verify": Verb(
        "read a checkpoint and compare every byte with its checksums",
        lambda: [_CHECKPOINT],
        run_verify,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``plsc checkpoint <verb> --flag ...``; return the exit code."""
    return run_verb("plsc checkpoint", "Look at, check and change checkpoints.", VERBS, arguments)
