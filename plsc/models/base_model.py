"""The base class of backbones, networks by name, and functions for any: dry run, initialisation, freezing."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from plsc.errors import OptionError, refusing, suggest
from plsc.names import DEFAULT_NECK, find_parameters, load_function
from plsc.seeds import hash_key
from plsc.values import Input, check_example, map_tensors

_SHORT, _WORD = re.compile(r".{0,200}", re.DOTALL), re.compile(r"[\w-]{0,200}")


class BaseModel(nn.Module, ABC):
    """Base class of all backbones, built-in and custom.

    Create the layers in ``__init__`` and call them in `build_network`, which runs in every forward pass::

        class MyModel(BaseModel):
            def __init__(self, emb_size=512):
                super().__init__()
                self.conv = nn.Conv2d(3, 64, 3, stride=2)
                self.fc = nn.Linear(64, emb_size)

            def build_network(self, input, label, is_train=True):
                return self.fc(self.conv(input).mean((2, 3)))

    Attributes:
        example_input: two samples, a tensor [2, ...] or a dict of such tensors. Set it in ``__init__`` if the
            input is not an image; samples are then neither decoded nor normalised.
        input_layout: memory format of the images passed to `build_network`; see `choose_memory_format`.
        kept_in_evaluation: modules that stay in evaluation mode, such as frozen batch norms.
        frozen_by_run: parameters that the run does not train; see `plsc.models.base_model`.
    """

    example_input: Input | None = None
    input_layout = torch.preserve_format
    kept_in_evaluation: tuple[nn.Module, ...] = ()
    frozen_by_run: tuple[nn.Parameter, ...] = ()
    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> BaseModel:
        """Record the constructor's arguments for `constructor_arguments`."""
        self = super().__new__(cls)
        object.__setattr__(self, "_given", (args, kwargs))
        return self

    @abstractmethod
    def build_network(self, input: Any, label: Tensor | None, is_train: bool = True) -> Tensor:
        """Return the embeddings [b, D] of images ``input`` [b, C, H, W], or of input like `example_input`.

        label: int64 [b], or None in prediction. is_train: whether this is a training step, by default
        ``self.training``.
        """

    def forward(self, input: Any, label: Tensor | None = None, is_train: bool | None = None) -> Tensor:
        """Cast images to the network's dtype and layout, other floats to its dtype, and call `build_network`.

        is_train: None means ``self.training``.
        """
        first = next((p for p in self.parameters() if p.is_floating_point()), None)
        if first is not None and self.example_input is None:
            input = input.to(first.dtype, memory_format=self.input_layout)
        elif first is not None:
            dtype = first.dtype
            input = map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, input)
        return self.build_network(input, label, self.training if is_train is None else is_train)

    def train(self, mode: bool = True) -> BaseModel:
        """Set training or evaluation mode, except for the modules of `keep_in_evaluation`."""
        super().train(mode)
        for module in self.kept_in_evaluation:
            module.train(False)
        return self

    def keep_in_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """Keep these modules in evaluation mode from now on, also after train()."""
        self.kept_in_evaluation = tuple(modules)
        self.train(self.training)


Custom = BaseModel | type[BaseModel]


@contextlib.contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode inside, and afterwards each module's previous mode."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def blank_input(model: nn.Module, image_shape: tuple[int, ...]) -> Input:
    """Return two blank images [2, C, H, W], or the example input of a network that takes no images."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    example = getattr(model, "example_input", None)
    if example is not None:
        check_example(example, f"example_input of {type(model).__name__}")
        return map_tensors(lambda one: one.to(device), example)
    dtype = first.dtype if first is not None and first.is_floating_point() else torch.float32
    return torch.zeros((2, *image_shape), device=device, dtype=dtype)


def dry_run(model: nn.Module, image_shape: tuple[int, ...], *, with_graph: bool = False) -> Any:
    """Return a network's output for `blank_input`; in evaluation mode, without side effects.

    Raises:
        OptionError: the network fails for images of ``image_shape`` (C, H, W), or its example input.
    """
    input = blank_input(model, image_shape)
    # Not in inference_mode: a network that caches a tensor in its first call (a position grid, a lazy
    # parameter) could not train with it later.
    graph = torch.enable_grad() if with_graph else torch.no_grad()
    name = type(model).__name__
    if getattr(model, "example_input", None) is None:
        way_out = "change the network or model.image_shape, or set its example_input if it takes no images"
        refused = refusing(f"{name} fails for images of shape {tuple(image_shape)}", way_out)
    else:
        refused = refusing(f"{name} fails for its example_input", "change the network or example_input")
    with evaluating(model), torch.random.fork_rng(devices=[]), graph, refused:
        return model(input)


def check_model(model: nn.Module, image_shape: tuple[int, ...], emb_size: int) -> None:
    """Check that ``model`` maps two blank images to embeddings [2, emb_size], without side effects.

    Raises:
        OptionError: the network fails for images of ``image_shape`` (C, H, W), does not return floating
            point embeddings of that size, or creates parameters in each call.
    """
    name = type(model).__name__
    output = dry_run(model, image_shape)
    is_embedding = isinstance(output, Tensor) and output.is_floating_point()
    if not is_embedding or output.shape != (2, emb_size):
        kind = f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise OptionError(
            f"{name} returns {kind} for 2 samples; expected floating point embeddings [2, {emb_size}]; "
            "change its last layer or model.emb_size"
        )
    _check_no_new_parameters(model, image_shape)


def _check_no_new_parameters(model: nn.Module, image_shape: tuple[int, ...]) -> None:
    """Raise OptionError if a second call registers or uses a parameter that did not exist before it.

    Parameters that the first call created once (nn.LazyLinear) are allowed.
    """
    before = {id(p): p for p in model.parameters()}  # references keep the ids unique
    output = dry_run(model, image_shape, with_graph=True)
    after = {id(p): (name, p) for name, p in model.named_parameters()}
    used = {id(leaf): ("", leaf) for leaf in _leaves(output)}
    fresh = next((found for key, found in {**used, **after}.items() if key not in before), None)
    if fresh is None:
        return
    name, parameter = fresh
    what = f"creates the parameter {name} in each call" if name else "uses a parameter that is not registered"
    raise OptionError(
        f"{type(model).__name__} {what} (shape {list(parameter.shape)}), so it is never trained; create the "
        "layer in __init__, as an attribute or in an nn.ModuleList"
    )


def _leaves(output: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to which backward() of ``output`` would add gradients."""
    seen: set[Any] = set()
    nodes: list[Any] = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        nodes.extend(previous for previous, _ in node.next_functions)


def choose_memory_format(
    network: BaseModel, image_shape: tuple[int, ...], device: torch.device, in_16_bits: bool
) -> None:
    """Switch a network to channels last, in place, if that is faster and the network supports it.

    It is faster for convolutions on CPUs, and on GPUs in 16 bits. A network that calls `view` on feature maps
    does not support it. Shapes and names do not change.
    """
    has_maps = network.example_input is None and any(isinstance(m, nn.Conv2d) for m in network.modules())
    if not has_maps or not (device.type == "cpu" or in_16_bits):
        return
    network.input_layout = torch.channels_last
    network.to(memory_format=torch.channels_last)
    try:
        dry_run(network, image_shape)
    except OptionError:
        network.input_layout = torch.preserve_format
        network.to(memory_format=torch.contiguous_format)


def find_layers(network: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules of these names. Raises OptionError, with similar names, if there is none."""
    modules = dict(network.named_modules())
    for name in names:
        if name not in modules:
            raise OptionError(f"there is no layer {name!r}; {suggest(name, modules)}")
    return {name: modules[name] for name in names}


@contextlib.contextmanager
def keeping_outputs(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield a dictionary to which the tensors that the layers return are added while the block runs."""
    kept: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(module: nn.Module, inputs: Any, output: Any, *, to: list[Tensor]) -> None:
        if isinstance(output, Tensor):
            to.append(output.detach())

    hooks = [
        layer.register_forward_hook(functools.partial(keep, to=kept[name])) for name, layer in layers.items()
    ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


class ForwardWrapper:
    """Replaces the `forward` attribute of a module instance; hooks, type and state-dict keys do not change.

    An object instead of a closure, so that deep copies of the network work. Subclasses override `__call__`.

    inner: the previous forward.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the previous forward."""
        return self.inner(*inputs, **named)


def unwrap(network: nn.Module) -> None:
    """Remove all `ForwardWrapper`s from a network, in place."""
    for module in network.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ForwardWrapper):
            while isinstance(forward, ForwardWrapper):
                forward = forward.inner
            del module.forward
            if forward != module.forward:  # set on the object by other code
                module.forward = forward


def constructor_arguments(model: BaseModel) -> dict[str, Any] | None:
    """Return the arguments of the network's constructor by name.

    None if an argument is not a number, bool, short string or None, or a list or dict of these. Strings that
    could be a path or URL, of which the query may be secret, are left out, as `safe_arguments` would.
    """
    args, kwargs = model._given
    signature = inspect.signature(type(model).__init__)
    given = dict(signature.bind(model, *args, **kwargs).arguments)
    given.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in given:
            return None
    return safe_arguments(given) if _is_plain(given, _SHORT) else None


def safe_arguments(saved: Any) -> dict[str, Any]:
    """Filter constructor arguments of a checkpoint: drop strings that could be a path or URL."""
    given = saved if isinstance(saved, dict) else {}
    return {name: value for name, value in given.items() if _is_plain(value, _WORD)}


def _is_plain(value: Any, strings: re.Pattern[str]) -> bool:
    """Return whether a value consists of plain types, and all its strings match the pattern."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain([key, one], strings) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one, strings) for one in value)
    if isinstance(value, str):
        return strings.fullmatch(value) is not None
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


NETWORKS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {}
"""The built-in networks by name: the class and its own arguments. The files of this folder add theirs."""
LIBRARIES: dict[str, Callable[..., BaseModel]] = {}
"""Builders of the networks of other libraries, ``<library>/<name>``: see `plsc/models/libraries.py`."""


def build_model(
    name: str | type[BaseModel],
    emb_size: int = 512,
    image_shape: Sequence[int] = (3, 112, 112),
    dropout: float = 0.4,
    neck: str = DEFAULT_NECK,
    arguments: Mapping[str, Any] | None = None,
) -> BaseModel:
    """Return the network of that name, with newly initialised weights.

    name: one of NETWORKS, ``torchvision/<name>``, ``timm/<name>``, ``package.module:Class``, or that class.
    arguments: further constructor arguments of that class.

    Raises:
        OptionError: unknown name, or options that the network does not support.
    """
    options = {"emb_size": emb_size, "image_shape": tuple(image_shape), "dropout": dropout, "neck": neck}
    library, _, inner = str(name).partition("/")
    if library in LIBRARIES:
        return LIBRARIES[library](inner, **options)
    if name in NETWORKS:
        made, own = NETWORKS[name]
        return made(**own, **options)
    return load_custom(name, **{**options, **(arguments or {})})


def load_custom(reference: str | type[BaseModel], **options: object) -> BaseModel:
    """Import ``package.module:Class`` unless it is the class, and return an instance; runs the user's code.

    options: passed to __init__ if it has parameters of these names.

    Raises:
        OptionError: no such module or class, no subclass of `BaseModel`, or its __init__ fails.
    """
    chosen: Any = reference
    if isinstance(reference, str):
        if reference.isidentifier():  # a name alone, of no module
            raise OptionError(f"unknown model {reference!r}; {suggest(reference, NETWORKS)}")
        chosen = load_function(reference, "model.name")
    if not (inspect.isclass(chosen) and issubclass(chosen, BaseModel)):
        raise OptionError(
            f"model.name is {reference!r}, which is not a network; expected a subclass of "
            "plsc.models.base_model.BaseModel"
        )
    accepted = inspect.signature(chosen).parameters
    advice = f"its __init__ can have the parameters {', '.join(options)}"
    with refusing(f"cannot create model {reference!r}", f"{advice}; or pass an instance to set_model"):
        return chosen(**{name: value for name, value in options.items() if name in accepted})


RULES = (
    "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal", "normal",
    "trunc_normal", "uniform", "constant",
)  # fmt: skip
"""The initialisation rules, all functions of torch.nn.init."""

_OF_MATRICES = ("xavier_", "kaiming_", "orthogonal")  # need parameters of two dimensions or more
_OPTION = "set_initialization"
_STREAM = 11  # part of the key, to separate these draws from other uses of the seed


@dataclass(frozen=True)
class Initialization:
    """An initialisation rule for the parameters that match a pattern (see `plsc.names.find_parameters`).

    rule: one of `RULES`; OptionError for any other. arguments: those of the function of torch.nn.init.
    """

    pattern: str
    rule: str
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise OptionError(f"unknown initialisation rule {self.rule!r}; {suggest(str(self.rule), RULES)}")


def initialise_by_rule(network: nn.Module, rules: Sequence[Initialization], seed: int) -> None:
    """Initialise the parameters that the rules match; the first matching rule applies.

    Values depend only on the seed and the parameter's name and shape, not on rank, device or other rules.
    torch.nn.init draws them in float32 on the CPU.

    Raises OptionError for a pattern that matches no parameter (with 2 or more dimensions, if the rule needs
    that), and for invalid arguments of a rule.
    """
    named = dict(network.named_parameters())
    taken: set[str] = set()
    for rule in rules:
        found = find_parameters(rule.pattern, network, _OPTION)
        if rule.rule.startswith(_OF_MATRICES):
            # Without a matrix, torch refuses the first vector.
            found = [name for name in found if named[name].ndim > 1] or found
        for name in found:
            if name not in taken:
                _initialise(named[name], name, rule, seed)
        taken.update(found)


def _initialise(parameter: nn.Parameter, name: str, rule: Initialization, seed: int) -> None:
    function: Any = getattr(nn.init, f"{rule.rule}_")
    drawn = torch.empty(parameter.shape)
    arguments = dict(rule.arguments)
    if "generator" in inspect.signature(function).parameters:
        generator = torch.Generator().manual_seed(hash_key(seed, _STREAM, zlib.crc32(name.encode())))
        arguments["generator"] = generator
    with refusing(f"{_OPTION}: the rule {rule.rule} cannot be used for {name} {list(drawn.shape)}"):
        function(drawn, **arguments)
    with torch.no_grad():
        parameter.copy_(drawn)


def freeze(network: BaseModel, names: Collection[str]) -> None:
    """Freeze the named parameters, and the running statistics of frozen batch norms.

    A batch norm stays in evaluation mode, also after ``network.train()``, if all its parameters are frozen;
    one without parameters, if all those of the enclosing module are. Dropout stays active in frozen modules.
    Call this after batch norms are synchronised and before the network is wrapped.
    """
    if not names:
        return
    network.frozen_by_run = tuple(
        parameter
        for name, parameter in network.named_parameters()
        if name in names and parameter.requires_grad
    )
    for parameter in network.frozen_by_run:
        parameter.requires_grad_(False)
    frozen = {id(p) for name, p in network.named_parameters() if name in names}
    network.keep_in_evaluation(
        module
        for path, module in network.named_modules()
        if isinstance(module, _NormBase) and module.track_running_stats and _is_frozen(network, path, frozen)
    )


def unfreeze(network: BaseModel) -> None:
    """Undo `freeze`; parameters that were frozen by other code stay frozen."""
    if network.frozen_by_run:
        network.keep_in_evaluation(())
    for parameter in network.frozen_by_run:
        parameter.requires_grad_(True)
    network.frozen_by_run = ()


def _is_frozen(network: nn.Module, path: str, frozen: set[int]) -> bool:
    """Return whether all parameters of the module, or of its nearest parent with parameters, are frozen."""
    while True:
        parameters = list(network.get_submodule(path).parameters())
        if parameters:
            return all(id(parameter) in frozen for parameter in parameters)
        if not path:
            return False
        path = path.rpartition(".")[0]


def copy_expanded_buffers(network: nn.Module) -> None:
    """Copy buffers whose elements share memory (`Tensor.expand`), in place: torch cannot write to them."""
    for module in network.modules():
        for name, buffer in module._buffers.items():
            strides = [] if buffer is None else zip(buffer.shape, buffer.stride(), strict=True)
            if buffer is not None and any(size > 1 and stride == 0 for size, stride in strides):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
