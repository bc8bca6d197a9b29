"""ReLU inside the kernel of the norm layer before it.

Precondition: what the norm layer returns goes to an `nn.ReLU` next, and nothing else can read it as it was before.
Effect: the kernel clips what it writes at zero, and the ReLU returns its input. Fallback: both run as they are.

Why this is exact. Nothing is learnt from earlier passes or guessed: at every call of a norm layer the code that called
it is looked up (the frame above `nn.Module.__call__`, by its instruction), and says what comes next:

- `nn.Sequential`'s own forward, where the next child is the ReLU, or
- a method of the module that has both as children, where the call is the ReLU's argument, `self.relu(self.bn(x))`, or
  the next statement, in the same block, calls the ReLU with the name just assigned: `x = self.bn(x); x = self.relu(x)`.

Between the two Python runs nothing but that attribute's lookup: they have no hooks, on them or global, that could see
the output, and the lookup is `nn.Module`'s own. An `nn.Identity` in between hands on the same tensor. Afterwards an
in-place ReLU has overwritten that tensor anyway, whoever kept it; where ReLU is not in place, the name of its input
must be assigned anew or be gone. The source of a method counts only if it compiles to the very code that is running,
so a file that was edited since does not mislead. Clipping before rounding gives the bits of clipping after it; the
gradient is masked by the output's sign, computed again from the same numbers by the same expression.

The ReLU knows the tensor by identity: the same module may be called with others, as after the addition of a ResNet's
block. Were it called with a clipped tensor unknown to it, such as one put together of two halves, clipping again would
change nothing.

Not before Python 3.11, which first tells where in a line an instruction stands, except in `nn.Sequential`.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

RELU, IDENTITY, SEQUENCE = nn.ReLU.forward, nn.Identity.forward, nn.Sequential.forward  # torch's own
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
LONGEST = 1_000_000  # characters of a file that is read, at most
HANDING_ON = {
    str(Path(__file__).parents[1] / each)
    for each in (
        "accelerate/norm_relu.py",
        "accelerate/accelerated.py",
        "accelerate/batch_norm.py",
        "accelerate/blended.py",
        "accelerate/sample_norms.py",
        "engine/norm_layers.py",
        "parts/statistics.py",
        "parts/stream_statistics.py",
    )
}
"""Files of ours that return a layer's output as it is. Not among them: the cache, and scales of single samples."""


@dataclass(frozen=True)
class Next:
    """A module that is called with an output, and whether no name is left for what it was called with."""

    name: str
    gone: bool


class NormReLU:
    """Says which calls of norm layers have a ReLU right after them, and lets that ReLU return its input.

    Args:
        modules: Every module of the twin as it is now.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._modules = modules
        self._parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._clipped: Tensor | None = None

    def patch(self) -> None:
        """Replace the forwards of ReLUs, and note which modules hold which."""
        self._parents, self._clipped = {}, None
        for module in self._modules():
            for name, child in module._modules.items():
                if child is not None:
                    self._parents.setdefault(child, []).append((module, name))
            if type(module) is nn.ReLU and "forward" not in module.__dict__:
                module.__dict__["forward"] = _ReLU(module, self)

    def follows(self, layer: nn.Module) -> bool:
        """Whether ReLU comes next, for the call of this layer that is under way."""
        owners = self._parents.get(layer, [])
        if len(owners) != 1 or _global_hooks():
            return False
        if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
        (owner, name), caller = owners[0], _caller(sys._getframe(1))
        if caller is None:
            return False
        gone = True
        for each in _after(owner, name, caller):
            gone = gone and each.gone
            module = owner._modules.get(each.name)
            if module is None or any(getattr(module, kind) for kind in HOOKS):
                return False
            if type(module) is nn.ReLU:
                own = isinstance(module.__dict__.get("forward"), _ReLU) and nn.ReLU.forward is RELU
                return own and (gone or bool(module.inplace))
            if type(module) is not nn.Identity or "forward" in module.__dict__ or nn.Identity.forward is not IDENTITY:
                return False
        return False

    def forget(self) -> None:
        """Let go of a tensor that no ReLU was called with."""
        self._clipped = None

    def clipped(self, output: Tensor) -> Tensor:
        """This output has been clipped: the ReLU that is called with it next returns it."""
        self._clipped = output
        return output

    def is_clipped(self, x: Tensor) -> bool:
        """Whether this is the tensor that was clipped last; asked once, since it may be written to from then on."""
        known, self._clipped = self._clipped, None
        return known is x


class _ReLU:
    """Takes the place of a ReLU's forward."""

    def __init__(self, module: nn.ReLU, owner: NormReLU) -> None:
        self._module, self._owner = module, owner

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        if len(args) == 1 and not named and self._owner.is_clipped(args[0]):
            known: Tensor = args[0]
            return known
        return type(self._module).forward(self._module, *args, **named)


def _global_hooks() -> bool:
    """Whether hooks are registered for all modules of the process."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def _caller(frame: FrameType | None) -> FrameType | None:
    """What called the layer, seen from inside its forward; None where another than we is in between."""
    while frame is not None and frame.f_code.co_filename in HANDING_ON:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != torch_module.__file__:  # not by `nn.Module.__call__`
        return None
    while frame is not None and frame.f_code.co_filename == torch_module.__file__:
        frame = frame.f_back
    return frame


def _after(owner: nn.Module, name: str, caller: FrameType) -> Iterable[Next]:
    """Children of `owner` that are called with the child's output, one with what the other returned."""
    kind: Any = type(owner)
    code = caller.f_code
    if code is SEQUENCE.__code__:
        names = list(owner._modules)
        own = isinstance(owner, nn.Sequential) and kind.__iter__ is nn.Sequential.__iter__
        return [Next(each, gone=True) for each in names[names.index(name) + 1 :]] if own else []
    if not hasattr(code, "co_positions"):
        return []
    called, *then = _calls(code, caller.f_lasti) or ("",)
    if called != name or not _is_method(kind, code):
        return []
    return then if all(_is_plain(owner, each.name) for each in then) else []


@lru_cache(maxsize=1024)
def _is_method(kind: type, code: CodeType) -> bool:
    """Whether the code is that of a method of the class."""
    functions = (each for parent in kind.__mro__ for each in vars(parent).values())
    return any(getattr(each, "__code__", None) is code for each in functions)


def _is_plain(owner: nn.Module, name: str) -> bool:
    """Whether `owner.name` is looked up among the children, and runs no other code."""
    kind: Any = type(owner)
    usual = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    return usual and name not in owner.__dict__ and not any(name in vars(parent) for parent in kind.__mro__)


@lru_cache(maxsize=1024)
def _calls(code: CodeType, instruction: int) -> tuple[Any, ...]:
    """The name of the child that is called at this instruction, and each `Next` that is called with what it returned.

    Empty where the call is not of the form `self.name(...)`, or the source is not that of the code.
    """
    first, last, begin, end = list(code.co_positions())[instruction // 2]  # type: ignore[attr-defined]
    function = _source(code)
    if function is None or not function.args.args:
        return ()
    me = function.args.args[0].arg
    stored = [
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    if me in stored:
        return ()
    local = set(code.co_varnames) - set(code.co_cellvars)  # names that no other function reads
    for block in _blocks(function):
        for place, statement in enumerate(block):
            for call in _calls_of(statement, me):
                if (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == (first, last, begin, end):
                    return call.func.attr, *_chain(call, block[place:], me, local)  # type: ignore[attr-defined]
    return ()


def _chain(call: ast.Call, block: list[ast.stmt], me: str, local: set[str]) -> list[Next]:
    """What is called with the value of `call`, a part of the block's first statement, one after the other."""
    found: list[Next] = []
    value: ast.expr = call
    statement, *rest = block
    while True:
        outer = [each for each in _calls_of(statement, me) if len(each.args) == 1 and each.args[0] is value]
        if outer:
            found.append(Next(outer[0].func.attr, gone=True))  # type: ignore[attr-defined]
            value = outer[0]
            continue
        if not isinstance(statement, ast.Assign) or statement.value is not value or len(statement.targets) != 1:
            return found
        name = statement.targets[0]
        if not isinstance(name, ast.Name) or name.id not in local or not rest:
            return found
        statement, *rest = rest
        inner = [each for each in _calls_of(statement, me) if len(each.args) == 1 and _names(each.args[0], name.id)]
        if len(inner) != 1 or _first(statement, me) is not inner[0]:
            return found
        value = inner[0]
        same = isinstance(statement, ast.Assign) and [ast.dump(each) for each in statement.targets] == [ast.dump(name)]
        alone = sum(_names(each, name.id) for each in ast.walk(statement)) == 1 + same
        ends = isinstance(statement, ast.Return)
        found.append(Next(value.func.attr, gone=alone and (same or ends)))  # type: ignore[attr-defined]


def _first(statement: ast.stmt, me: str) -> ast.Call | None:
    """The call that a statement runs before anything else: the innermost of `self.a(self.b(x))`."""
    value = getattr(statement, "value", None) if isinstance(statement, ast.Assign | ast.Return | ast.Expr) else None
    while isinstance(value, ast.Call) and _is_child(value, me):
        if isinstance(value.args[0], ast.Name):
            return value
        value = value.args[0]
    return None


def _is_child(call: ast.Call, me: str) -> bool:
    """Whether it is `self.name(argument)`."""
    plain = isinstance(call.func, ast.Attribute) and _names(call.func.value, me)
    return plain and len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)


def _calls_of(statement: ast.stmt, me: str) -> list[ast.Call]:
    """The calls `self.name(argument)` in a statement that has no block of its own."""
    if not isinstance(statement, ast.Assign | ast.Return | ast.Expr) or statement.value is None:
        return []
    return [node for node in ast.walk(statement.value) if isinstance(node, ast.Call) and _is_child(node, me)]


def _names(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements that run one after the other; not those of functions and classes inside, nor of `try`."""
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if isinstance(block, list) and all(isinstance(each, ast.stmt) for each in block):
            yield block
            for each in block:
                if isinstance(each, ast.If | ast.For | ast.While | ast.With):
                    yield from _blocks(each)


def _source(code: CodeType) -> ast.FunctionDef | None:
    """The function that the code was compiled from; None where its source is not to be had, or is another by now."""
    tree, codes = _parsed(code.co_filename)
    if tree is None or code not in codes:
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == code.co_name
        and min([node.lineno, *(each.lineno for each in node.decorator_list)]) == code.co_firstlineno
    ]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=16)
def _parsed(filename: str) -> tuple[ast.Module | None, frozenset[CodeType]]:
    """A file's syntax tree, and the code of everything in it."""
    text = "".join(linecache.getlines(filename))
    try:
        if not text or len(text) > LONGEST:
            return None, frozenset()
        tree = ast.parse(text, filename)
        waiting, codes = [compile(text, filename, "exec", dont_inherit=True)], set()
    except (SyntaxError, ValueError, RecursionError):
        return None, frozenset()
    while waiting:
        inside = [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
        waiting += inside
        codes.update(inside)
    return tree, frozenset(codes)
