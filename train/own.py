"""The user's own functions: MODULE:FUNCTION in place of one of an option's choices."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from train.errors import TrainError
from train.loaded_code import is_installed

Function = Callable[..., Any]

NAMED = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")

# by option: the arguments, and what is to be returned
CALLS = {
    "data": (
        (),
        "(classes, train, val): the names of the classes, and two data sets, each with all `targets` or `labels` and "
        "images: PIL images, encoded files, or uint8 arrays (H, W, 3) or tensors (3, H, W)",
    ),
    "augment": (("image", "seed"), "a uint8 array of the image's shape, (side, side, 3)"),
    "optimizer": (
        ("groups", "lr"),
        "a torch.optim.Optimizer of all parameters of the groups, whose step() needs no closure",
    ),
    "log-to": (("record",), "nothing"),
    "schedule": (("step", "steps"), "a factor of --lr for the step, counted from 0"),
    "loss": (("logits", "labels"), "a tensor of shape (n,): the loss of each image"),
}


def is_own(text: str) -> bool:
    """Whether an option names a function; synthetic:9 does not."""
    return NAMED.fullmatch(text) is not None


def own(option: str, text: str) -> Function:
    """Return the user's function MODULE:FUNCTION, which --`option` names.

    Raises:
        TrainError: it does not exist, or does not take the arguments in CALLS.
    """
    module = imported(option, text)
    name = text.partition(":")[2]
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise TrainError(f"--{option} {text}: {module.__file__} has no function {name}")
    arguments, _ = CALLS[option]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TrainError(f"--{option} {text}: {_place(function, module)}: {error}; {_call(option)}") from error
    except ValueError:  # a compiled function that does not say what it takes
        pass
    return function  # type: ignore[no-any-return]


def imported(option: str, text: str) -> ModuleType:
    """Import the module of MODULE:FUNCTION. Raises TrainError if that fails, for whatever reason."""
    where = text.partition(":")[0]
    try:
        return importlib.import_module(where)
    except ImportError as error:
        raise TrainError(
            f"--{option} {text}: cannot import {where} ({error}); start in the folder that contains it, or set "
            f"PYTHONPATH"
        ) from error
    except Exception as error:
        raise TrainError(f"--{option} {text}: {said(error)}") from error


def tried(option: str, text: str, *arguments: Any) -> Any:
    """Return the result of the user's function, called before the run begins. Raises TrainError for any error of it."""
    return called(option, text, own(option, text), *arguments)


def called(option: str, text: str, function: Function, *arguments: Any) -> Any:
    """Return the result of the user's function. Raises TrainError for any error of it."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TrainError(f"--{option} {text}: {said(error)}; {_call(option)}") from error


def unfit(option: str, text: str, found: str) -> TrainError:
    """Return the error for a function that returned something else than CALLS says."""
    function, module = own(option, text), imported(option, text)
    return TrainError(f"--{option} {text}: {_place(function, module)}: it returned {found}; {_call(option)}")


def described(found: Any) -> str:
    """Return an object's type, and of an array its type of values and shape."""
    kind = f"a {type(found).__name__}"
    return f"{kind} of {found.dtype}, shape {tuple(found.shape)}" if hasattr(found, "dtype") else kind


def _call(option: str) -> str:
    arguments, returned = CALLS[option]
    return f"it is called as f({', '.join(arguments)}), and must return {returned}"


def _place(function: Function, module: ModuleType) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else f"{module.__file__}"


def said(error: BaseException) -> str:
    """Return the file and line of the user that an error comes from, and its first line."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if frame.filename != __file__ and not is_installed(frame.filename)]
    at = (users or frames)[-1]
    return f"{at.filename}:{at.lineno}: {type(error).__name__}: {(str(error).splitlines() or ['no text'])[0]}"
