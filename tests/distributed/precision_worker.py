"""Train with scripted overflows on one and three ranks: precision_worker.py DATASET FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from plsc.parallel.world import World
from tests.distributed.worker import smaller_world
from tests.overflowing import logged, scale_in_any_mode, train_scripted
from tests.resuming import different, options_of, saved_at

# Two overflows in a row halve the scale, three finite steps double it. g, p, e: see tests/overflowing.py.
SCRIPT = [
    # kind, scale after the step, number of skipped steps, number of previous updates
    (".", 8, 0, 0), (".", 8, 0, 1), (".", 16, 0, 2),
    ("g", 16, 1, 3), (".", 16, 1, 3),  # a single overflow does not change the scale
    ("g", 16, 2, 4), ("p", 8, 3, 4), ("e", 8, 4, 4), ("p", 4, 5, 4),
    (".", 4, 5, 4), (".", 4, 5, 5), (".", 8, 5, 6),
    ("g", 8, 6, 7), ("e", 4, 7, 7), ("e", 4, 8, 7), ("g", 2, 9, 7), ("g", 2, 10, 7), ("g", 1, 11, 7),
    ("p", 1, 12, 7), ("g", 1, 13, 7),  # never below 1
]  # fmt: skip
BOUNDARIES, FACTOR, RATE = (3, 5), 0.5, 8.0 * 6 / 1024
SCALING = {"init_loss_scaling": 8.0, "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}
SETTINGS = {
    "train__global_batch_size": 6, "train__epochs": 1, "head__loss_type": "dist_adaface",
    "optim__schedule": {"name": "step", "boundaries": BOUNDARIES, "factor": FACTOR}, "optim__lr": RATE,
    "precision__scaling_arguments": SCALING,
}  # fmt: skip
FIXED = {"precision__scaling_arguments": {**SCALING, "use_dynamic_loss_scaling": False}}
SAMPLED = {
    "head__sample_ratio": 0.5, "train__micro_batches": 2, "optim__clip_norm": 0.5,
    "head__optimizer": "adamw", "model__sync_batch_norm": True,
    "precision__mode": "bfloat16", "precision__lists": {"custom_black_list": ["batch_norm"]},
}  # fmt: skip
DENSE = {"head__loss_type": "curricularface", "optim__clip_norm": 0.5}


def check_table(world: World | None, dataset: Path, folder: Path) -> None:
    """Check the table, and the same steps with a fixed scale."""
    if world is None:
        return
    kinds, scales, skipped, updates = map(list, zip(*SCRIPT, strict=True))
    rates = [RATE * FACTOR ** sum(n >= b for b in BOUNDARIES) for n in updates]
    for name, more in (("dynamic", {}), ("fixed", FIXED))[: 2 if world.size == 3 else 1]:
        save_dir = folder / f"{name}{world.size}"
        train_scripted(options_of(dataset, save_dir, **{**SETTINGS, **more}), world, "".join(kinds))
        world.barrier()
        found = logged(save_dir, "loss_scale", "skipped_steps", "lr")
        assert found["loss_scale"] == ([8.0] * len(scales) if more else scales), found
        assert found["skipped_steps"] == skipped, found
        assert all(abs(a - b) < 1e-9 for a, b in zip(found["lr"], rates, strict=True)), found


def check_heads_and_resume(world: World, dataset: Path, folder: Path) -> None:
    """Check sampling with clipped micro-batches, and a replicated head; both resume between overflows."""
    script = "".join(kind for kind, *_ in SCRIPT)
    for name, more in (("sampled", SAMPLED), ("dense", DENSE)):
        settings = {**SETTINGS, **more, "checkpoint__every_n_steps": 5, "checkpoint__keep_last": -1}

        def start(where: str, settings=settings, **further) -> None:
            train_scripted(options_of(dataset, folder / where, **settings, **further), world, script)
            world.barrier()

        start(name)
        found = logged(folder / name, "loss_scale", "lr", "skipped_steps")
        assert found["loss_scale"] == [scale for _, scale, _, _ in SCRIPT]
        step = {"sampled": 10, "dense": 15}[name]  # amid finite steps, amid overflows
        start("again " + name, checkpoint__load_dir=str(saved_at(folder / name, step)))
        again = logged(folder / f"again {name}", "loss_scale", "lr", "skipped_steps")
        assert again == {key: values[step:] for key, values in found.items()}
        if world.is_main:
            assert not different(folder / f"again {name}/0", folder / f"{name}/0")


def main() -> None:
    dataset, folder = map(Path, sys.argv[1:])
    scale_in_any_mode(pytest.MonkeyPatch())
    full = World.from_environment("cpu")
    for world in (smaller_world(full, 1), full):
        check_table(world, dataset, folder)
        dist.barrier()
    check_heads_and_resume(full, dataset, folder)
    print("all as the table says")
    full.close()


if __name__ == "__main__":
    main()
