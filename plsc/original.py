"""Setters of the original PLSC that do more than set one option of the same name."""

from __future__ import annotations

import difflib
import getpass
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plsc.config.option import name_and_arguments, shown_value
from plsc.config.options import SYNONYMS, all_options, find_option
from plsc.errors import OptionError
from plsc.heads.margins import MARGINS, build_margin

if TYPE_CHECKING:  # written by tools/generate.py: each setter with its types
    from plsc.config.setters import Setters
else:
    from plsc.config.options import Setters

NO_MARGINS = (1.0, 0.0, 0.0)
PLSC_MARGINS = {"arcface": (1.0, 0.5, 0.0), "cosface": (1.0, 0.0, 0.35), "sphereface": (1.35, 0.0, 0.0)}
"""Margins m1, m2 and m3 of PLSC in cos(m1 theta + m2) - m3: none, and the defaults of each loss."""
PLSC_NAMES = {
    "num_classes": "class_num",
    "emb_dim": "emb_size",
    "calc_train_acc": "calc_acc",
}
"""Attributes of PLSC's Entry that have no setter of the same name."""


class OriginalSetters(Setters):
    """The setters, with those of PLSC that differ from the option table; options as attributes."""

    __slots__ = ("_model_parallel",)

    def __getattr__(self, name: str) -> Any:
        """Return the value of the option of ``set_<name>``, such as ``ins.train_batch_size``."""
        setter = f"set_{PLSC_NAMES.get(name, name)}"
        for spec in all_options() if not name.startswith("_") else ():
            if spec.setter == setter:
                return self.options.get(spec.path)
        setters = {spec.setter: spec.setter for spec in all_options() if spec.setter}
        setters |= {f"set_{word}": find_option(path).setter for word, path in SYNONYMS.items()}
        near = difflib.get_close_matches(name, setters, 1, cutoff=0.8)
        ending = f"; did you mean {setters[near[0]]!r}?" if near else ""
        # Python's own suggestion would follow if obj were this object.
        raise AttributeError(f"Entry has no attribute {name!r}{ending}", name=name, obj=None)

    def set_loss_type(
        self,
        loss_type: str,
        margin1: float | None = None,
        margin2: float | None = None,
        margin3: float | None = None,
        **arguments: Any,
    ) -> None:
        """Set ``head.loss_type`` and its arguments, or its margins in cos(margin1 theta + margin2) - margin3.

        Args:
            loss_type: see `head.loss_type`.
            margin1: None has PLSC's default: 1, 0.5, 0 for arcface; 1, 0, 0.35 for cosface; 1.35, 0, 0 for
                sphereface. If a margin is given that the loss does not have, the loss becomes ``combined``.
            margin2: as margin1.
            margin3: as margin1.
            **arguments: margin and scale set ``head.margin`` and ``head.scale``, others
                ``head.loss_arguments``, such as h of adaface; see docs/options.md#losses.
        """
        name = str(loss_type).removeprefix("dist_")
        prefix = "dist_" if self._model_parallel or name != loss_type else ""
        own_options = {key: arguments.pop(key) for key in ("margin", "scale") if key in arguments}
        values = {f"head.{key}": value for key, value in own_options.items()}
        values |= {"head.loss_type": prefix + name, "head.loss_arguments": arguments or None}
        given = (margin1, margin2, margin3)
        if given != (None, None, None):
            if name not in PLSC_MARGINS:
                raise OptionError(
                    f"the loss is {loss_type!r}, but margin1, margin2 and margin3 are for "
                    f"{', '.join(PLSC_MARGINS)}; pass its own arguments"
                )
            defaults = PLSC_MARGINS[name]
            margins = tuple(one if mine is None else mine for mine, one in zip(given, defaults, strict=True))
            own = next(index for index in range(3) if defaults[index] != NO_MARGINS[index])
            if margins[:own] + margins[own + 1 :] == NO_MARGINS[:own] + NO_MARGINS[own + 1 :]:
                values["head.margin"] = margins[own]
            else:
                values |= {
                    "head.loss_type": prefix + "combined",
                    "head.loss_arguments": {**arguments, "margins": margins},
                }
        kind = values["head.loss_type"].removeprefix("dist_")
        if kind in MARGINS:  # an unknown one is refused below
            build_margin(kind, **own_options, **(values["head.loss_arguments"] or {}))
        self.options.set_together(values)

    def set_step_boundaries(self, boundaries: Sequence[int]) -> None:
        """Use the schedule step, with these boundaries."""
        self.set_lr_schedule("step", boundaries=boundaries)

    def set_lr_decay_factor(self, factor: float) -> None:
        """Use the schedule step, with this factor at each boundary."""
        self.set_lr_schedule("step", factor=factor)

    def set_lr_schedule(self, schedule: Any, **arguments: Any) -> None:
        """Set ``optim.schedule``, by name; of a step schedule, arguments that were set before stay."""
        before, own = name_and_arguments(self.options.get("optim.schedule"))
        is_step = schedule == before == "step"
        super().set_lr_schedule(schedule, **{**(own if is_step else {}), **arguments})

    def set_warmup_epochs(self, num: int) -> None:
        """Set ``optim.warmup_steps`` in epochs."""
        self.set_warmup_steps(f"{num}ep" if num else 0)

    def set_model_parallel(self, flag: bool) -> None:
        """Shard the class weights over the ranks, or not: the prefix dist_ of ``head.loss_type``."""
        self._model_parallel = flag
        name = self.options.get("head.loss_type").removeprefix("dist_")
        self.options.set("head.loss_type", "dist_" * flag + name)

    def set_distfc_attr(self, param_attr: Any = None, bias_attr: Any = None) -> None:
        """Accept the call of PLSC without attributes; raise OptionError that names the setters otherwise."""
        if param_attr is not None or bias_attr not in (None, False):
            raise OptionError(
                f"param_attr is {param_attr!r}, bias_attr is {bias_attr!r}; classes have no bias, "
                "and their weights have set_head_lr_factor and set_head_weight_decay"
            )

    def set_input_info(self, input_holder: Sequence[Mapping[str, Any]]) -> None:
        """Set ``model.image_shape`` from PLSC's description of the inputs.

        Args:
            input_holder: mappings with name, shape and dtype, of an image [-1, C, H, W] and a label.
        """
        given = input_holder if isinstance(input_holder, (list, tuple)) else ()
        shapes = {str(one.get("name")): one.get("shape") for one in given if isinstance(one, Mapping)}
        shape = shapes.get("image")
        if set(shapes) != {"image", "label"} or not isinstance(shape, (list, tuple)) or len(shape) != 4:
            raise OptionError(
                f"the inputs are {shown_value(input_holder)}; expected 'image' of shape [-1, channels, "
                "height, width] and 'label', as no other inputs are read"
            )
        self.set_image_shape(shape[1:])

    def set_hdfs_info(
        self,
        fs_name: str,
        fs_ugi: str | None = None,
        fs_dir_for_save: str | None = None,
        fs_checkpoint_dir: str | None = None,
    ) -> None:
        """Download a checkpoint from HDFS before training, and upload each saved checkpoint to HDFS.

        Args:
            fs_name: file system: ``hdfs://namenode:9000``, ``namenode:9000``, or the URL of another one.
            fs_ugi: "name,password" of the HDFS user. The password is ignored and not stored: simple
                authentication of HDFS uses only the name.
            fs_dir_for_save: folder for the checkpoints of set_model_save_dir. On HDFS, a relative path is
                below the user's home, ``/user/<name>``; elsewhere, below `fs_name`.
            fs_checkpoint_dir: folder of a checkpoint or of a run, whose newest checkpoint is used. It is
                downloaded to the folder of set_checkpoint_dir (by default to the cache) and loaded.

        Equivalent to set_upload_dir and set_download_dir with URLs. Raises OptionError if fs_name is not the
        name or URL of a file system.
        """
        if not isinstance(fs_name, str) or not fs_name.strip() or fs_name.startswith(("/", ".")):
            raise OptionError(
                f"fs_name is {fs_name!r}; expected a file system, such as hdfs://namenode:9000 or s3://bucket"
            )
        root = fs_name if "://" in fs_name else f"hdfs://{fs_name}"
        values: dict[str, str] = {}
        if fs_ugi is not None:
            # A password follows the comma: do not store or print it.
            values["checkpoint.hdfs_user"] = str(fs_ugi).split(",", 1)[0].strip()
        user = values.get("checkpoint.hdfs_user") or self.options.get("checkpoint.hdfs_user")
        for option, folder in (("upload_dir", fs_dir_for_save), ("download_dir", fs_checkpoint_dir)):
            if folder is not None and "://" not in folder:
                is_below_home = root.startswith(("hdfs://", "webhdfs://")) and not folder.startswith("/")
                home = f"user/{user or _login_name()}" if is_below_home else ""
                folder = posixpath.join(root, home, folder.lstrip("/"))
            if folder is not None:
                values[f"checkpoint.{option}"] = folder
        self.options.set_together(values)


def _login_name() -> str:
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
