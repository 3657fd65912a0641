"""Types of the job file's values: validation, normal form, JSON Schema and serialization."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

from launcher.job import scalars
from launcher.job.arguments import option_of
from launcher.job.problems import BadValueError, LocatedError, Path, show
from launcher.job.scalars import (
    AmbiguousBool,
    Args,
    ArgValue,
    Gpus,
    is_url,
    parse_path,
    parse_text,
    require_data_url,
    whole,
)
from launcher.model.checked import NODE_NAME
from launcher.model.container import DataSet, Mount

Result = TypeVar("Result")

_TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_DATA_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_JOB_NAME = "[a-z0-9][a-z0-9-]{0,62}"
_OPTION = re.compile(r"-{0,2}[A-Za-z0-9][A-Za-z0-9_.-]*")


def parse_mounts(value: Any) -> tuple[Mount, ...]:
    """Parse `{/source: /target[:ro|:rw]}`, in the order written."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, Mount) for item in value):
        return tuple(value)
    if not isinstance(value, Mapping):
        raise BadValueError(f"expected a mapping such as {{/data: /data:ro}}, not {show(value)}")
    targets: dict[str, str] = {}

    def parse(source: Any, target: Any) -> Mount:
        path, _, mode = (target if isinstance(target, str) else "").partition(":")
        if not path or mode not in ("", "ro", "rw"):
            raise BadValueError(f"expected /path, /path:ro or /path:rw inside the container, not {show(target)}")
        mount = Mount(_source(source), parse_path(path), mode == "ro")
        if mount.target in targets:
            raise BadValueError(f"{mount.target} is also the target of {targets[mount.target]}")
        targets[mount.target] = mount.source
        return mount

    return tuple(each(value.items(), parse))


def _source(value: Any) -> str:
    """Return the path of a folder of the nodes: absolute, or `~/...` in the ssh user's home on each of them."""
    if isinstance(value, str) and (value == "~" or value.startswith("~/")):
        return "~" + parse_path(f"/{value[2:]}").rstrip("/")
    return parse_path(value)


def parse_data(value: Any) -> tuple[DataSet, ...]:
    """Parse `{name: {from: source, at: /target}}`, in the order written."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, DataSet) for item in value):
        return tuple(value)
    if not isinstance(value, Mapping):
        raise BadValueError(f"expected a mapping such as {{pets: {{from: ./pets, at: /data/pets}}}}, not {show(value)}")

    def parse(name: Any, item: Any) -> DataSet:
        if not isinstance(name, str) or not re.fullmatch(_DATA_NAME, name):
            raise BadValueError("expected a short name of letters, digits, . _ and -")
        if not isinstance(item, Mapping) or set(item) != {"from", "at"}:
            raise BadValueError(f"expected {{from: SOURCE, at: /path}}, not {show(item)}")
        keys = [("from", item["from"]), ("at", item["at"])]
        source, at = each(keys, lambda key, text: _from(text) if key == "from" else parse_path(text))
        return DataSet(str(name), source, at)

    return tuple(each(value.items(), parse))


def _from(value: Any) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise BadValueError(f"expected host:/path, a URL, or a path on this machine, not {show(value)}")
    if is_url(value):
        return require_data_url(str(value))
    host, colon, path = value.partition(":")
    if colon and "/" not in host and not path.startswith(("/", "~/")):
        raise BadValueError(f"expected an absolute path after the host, such as {host}:/data, not {show(value)}")
    return str(value)


def _show_data(sets: tuple[DataSet, ...]) -> dict[str, dict[str, str]]:
    return {data.name: {"from": data.source, "at": data.at} for data in sets}


def _show_mounts(mounts: tuple[Mount, ...]) -> dict[str, str]:
    return {mount.source: mount.target + (":ro" if mount.read_only else "") for mount in mounts}


def parse_args(value: Any) -> Args:
    """Parse a mapping of options to text, boolean, null or list of texts; or a list of texts. See `job.arguments`."""
    if not isinstance(value, Mapping):
        return _texts(value, "a mapping or a list of arguments")
    options: dict[str, str] = {}

    def parse(key: Any, item: Any) -> tuple[str, ArgValue]:
        name, parsed = parse_option(key, item)
        if (twin := options.setdefault(option_of(name).replace("_", "-"), name)) != name:
            raise BadValueError(f"is the same option as {twin}")
        return name, parsed

    return dict(each(value.items(), parse))


def parse_option(key: Any, value: Any) -> tuple[str, ArgValue]:
    """Parse an entry of a mapping of options. Raises BadValueError."""
    if not isinstance(key, str) or not _OPTION.fullmatch(key):
        raise BadValueError("expected the name of an option, such as batch_size, or --batch_size as it is written")
    return str(key), _arg_value(value)


def _arg_value(value: Any) -> ArgValue:
    if isinstance(value, AmbiguousBool):
        word, truth = str(value), _TRUTH[value.lower()]
        raise BadValueError(f"{word} is ambiguous; write {truth} for a boolean or '{word}' for text")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)):
        return _texts(value, "a list of plain values")
    if isinstance(value, Mapping):
        raise BadValueError("expected a plain value or a list of plain values, not a mapping")
    return parse_text(value)


def _texts(value: Any, expected: str, hint: str = "") -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise BadValueError(f"expected {expected}, not {show(value)}{hint}")
    return tuple(each(enumerate(value), lambda _, item: parse_text(item)))


def each(items: Iterable[tuple[Any, Any]], parse: Callable[[Any, Any], Result]) -> list[Result]:
    """Parse all items. Raises LocatedError with all problems, by key."""
    results: list[Result] = []
    problems: list[tuple[Path, str]] = []
    for key, item in items:
        try:
            results.append(parse(key, item))
        except LocatedError as error:
            problems += [((key, *path), message) for path, message in error.problems]
        except BadValueError as error:
            problems.append(((key,), str(error)))
    if problems:
        raise LocatedError(problems)
    return results


def _processes(value: Any) -> str | int:
    return "auto" if value == "auto" else whole("auto or a number of workers", 1, 1024)(value)


def _host_address(value: Any) -> str:
    return "host-gateway" if value == "host-gateway" else scalars.parse_address(value)


def matching(pattern: str, expected: str) -> Any:
    """Return a validator of text that must match `pattern`; `expected` completes the message "expected ..."."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            quote = "; write it in quotes" if isinstance(value, (int, float)) else ""
            raise BadValueError(f"expected {expected}, not {show(value)}{quote}")
        return str(value)

    return BeforeValidator(check)


def parse_webhook(value: Any) -> str:
    """Return a URL that a notification can be posted to. It may contain a token, so no message quotes it."""
    such = "expected a URL such as https://chat.example.org/hooks/1"
    if value == "":
        return ""
    if not isinstance(value, str) or not re.match("https?://", value):
        raise BadValueError(f"{such}, with http:// or https://")
    if not value.isascii() or not value.isprintable() or " " in value:
        how = "other characters are written in ASCII: in a path as %C3%BC, in a host's name as xn--..."
        raise BadValueError(f"{such}, without blanks; {how}")
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises ValueError
        named = (parts.hostname or "").encode("idna")
    except ValueError:  # also UnicodeError
        raise BadValueError(f"{such}; its host or port is none") from None
    if "@" in parts.netloc:
        raise BadValueError(f"{such}; a user and password before the host are not sent: use notify.command for them")
    if not named:
        raise BadValueError(f"{such}; it names no host")
    return str(value)


def _job_name(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(_JOB_NAME, value):
        return str(value)
    hint = "; write it in quotes" if isinstance(value, (int, float)) else ""
    if isinstance(value, str) and (close := re.sub("[^a-z0-9]+", "-", value.lower()).strip("-")[:63]):
        hint = f"; for example {close}"
    raise BadValueError(f"expected a name of at most 63 lower-case letters, digits and dashes, not {show(value)}{hint}")


def _is_no_file(module: str) -> str:
    if module.endswith(".py"):
        raise BadValueError(f"expected a module, not a file: {module.removesuffix('.py')}; or script: {module}")
    return module


def _argv(value: Any) -> tuple[str, ...]:
    hint = ""
    if isinstance(value, str):
        with suppress(ValueError):  # a quote is not closed
            hint = f"; write [{', '.join(map(_as_item, shlex.split(value)))}]"
    return _texts(value, "a list with one item per argument", hint)


def _as_item(word: str) -> str:
    """Return a word as an item of a list in YAML."""
    return word if re.fullmatch(r"[\w./=-]+", word) else json.dumps(word)


def _passable(env: Mapping[str, str]) -> Mapping[str, str]:
    each(env.items(), lambda name, value: scalars.require_passable(f"{name}={value}"))
    if re.search(r"\$\{?PATH\b", env.get("PATH", "")):
        what = f"{env['PATH']} would be passed as written, and no program found: expected the whole PATH of the image"
        raise LocatedError([(("PATH",), f"{what}; `docker image inspect IMAGE` shows it")])
    return env


def schema(**keywords: Any) -> WithJsonSchema:
    return WithJsonSchema(keywords)


_TEXT = {"type": ["string", "number", "boolean"]}  # a scalar that is passed to a program as text
_LIST = {"type": "array", "items": _TEXT}
_OPTIONS = {
    "type": "object",
    "propertyNames": {"pattern": f"^{_OPTION.pattern}$"},
    "additionalProperties": {"anyOf": [{"type": ["string", "number", "boolean", "null"]}, _LIST]},
}
_GPU_LIST = {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1, "uniqueItems": True}

JobName = Annotated[
    str,
    BeforeValidator(_job_name),
    schema(type="string", pattern=f"^{_JOB_NAME}$"),
]
NodeName = Annotated[str, matching(f"|{NODE_NAME}", "a short name of letters, digits, . _ and -")]
Host = Annotated[str, BeforeValidator(scalars.parse_host)]
Address = Annotated[str, BeforeValidator(scalars.parse_address)]
Reference = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,400}", "an image such as registry/name:tag or name@sha256:...")
]
TorchVision = Annotated[str, matching(r"auto|keep|\d+\.\d+\.\d+(\.post\d+)?", "auto, keep or a version X.Y.Z")]
Requirement = Annotated[
    str,
    matching(r"[A-Za-z0-9][^\x00-\x1f\x7f]*", "a pip requirement such as timm==1.0.9 (without options of pip)"),
]
LocalPath = Annotated[str, matching(r"[^\x00-\x1f\x7f]+", "a path")]
Revision = Annotated[
    str,
    matching(r"(?!-)[^\x00-\x1f\x7f]+", "a commit, branch or tag"),
    BeforeValidator(parse_text),  # pydantic calls the last one first
    schema(**_TEXT),
]
Code = Annotated[
    str,
    matching(r"(?!-)[^\x00-\x1f\x7f]+", "a folder, commit, branch or tag"),
    BeforeValidator(parse_text),  # pydantic calls the last one first
    schema(**_TEXT),
]
ContainerPath = Annotated[str, BeforeValidator(parse_path), schema(type="string", pattern="^/")]
Mounts = Annotated[
    tuple[Mount, ...],
    PlainValidator(parse_mounts),
    PlainSerializer(_show_mounts),
    schema(type="object", additionalProperties={"type": "string", "pattern": "^/"}),
]
_SOURCE_AND_TARGET = {
    "type": "object",
    "properties": {
        "from": {
            "description": "A file or folder: `host:/path` on a node, a path on this machine, or a URL "
            "(`s3://`, `https://`, `hf://`), which is downloaded once.",
            "type": "string",
            "minLength": 1,
        },
        "at": {"description": "Path in the containers.", "type": "string", "pattern": "^/"},
    },
    "required": ["from", "at"],
    "additionalProperties": False,
}
DataSets = Annotated[
    tuple[DataSet, ...],
    PlainValidator(parse_data),
    PlainSerializer(_show_data),
    schema(type="object", propertyNames={"pattern": f"^{_DATA_NAME}$"}, additionalProperties=_SOURCE_AND_TARGET),
]
ModuleName = Annotated[
    str,
    matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "a Python module such as train"),
    AfterValidator(_is_no_file),
]
Argv = Annotated[tuple[str, ...], PlainValidator(_argv), schema(**_LIST)]
ArgsField = Annotated[Args, PlainValidator(parse_args), schema(anyOf=[_OPTIONS, _LIST])]
EnvName = Annotated[
    str,
    matching(
        r"(?!LAUNCHER_)[A-Za-z_][A-Za-z0-9_]*",
        "a variable's name: letters, digits and _, without the prefix LAUNCHER_, which is reserved",
    ),
]
Env = Annotated[
    Mapping[EnvName, Annotated[str, PlainValidator(parse_text), schema(**_TEXT)]], AfterValidator(_passable)
]
GpusField = Annotated[
    Gpus,
    PlainValidator(scalars.parse_gpus),
    schema(anyOf=[{"enum": ["all", "none"]}, {"type": "integer", "minimum": 0}, _GPU_LIST]),
]
Processes = Annotated[
    str | int, PlainValidator(_processes), schema(anyOf=[{"const": "auto"}, {"type": "integer", "minimum": 1}])
]
Flag = Annotated[bool, PlainValidator(scalars.parse_flag), schema(type="boolean")]
Restarts = Annotated[int, PlainValidator(whole("a number of restarts", 0, 1000)), schema(type="integer", minimum=0)]
MinNodes = Annotated[int, PlainValidator(whole("a number of nodes", 1, 1000)), schema(type="integer", minimum=1)]
Port = Annotated[int, PlainValidator(whole("a port", 1024, 65535)), schema(type="integer", minimum=1024, maximum=65535)]
Duration = Annotated[
    int,
    PlainValidator(scalars.parse_duration),
    PlainSerializer(scalars.show_duration),
    schema(title="duration", type=["string", "number"], examples=["24h", "15m", "1h30m"]),
]
Size = Annotated[
    int,
    PlainValidator(scalars.parse_size),
    PlainSerializer(scalars.show_size),
    schema(title="size", type=["string", "integer"], examples=["64g", "512m"]),
]
Cpus = Annotated[float, PlainValidator(scalars.parse_cpus), schema(type="number")]
Device = Annotated[str, matching(r"/[^:\s]*(:/[^:\s]*)?(:[rwm]{1,3})?", "a device: /dev/x or /dev/x:/dev/y:rwm")]
Capability = Annotated[str, matching(r"[A-Z][A-Z_]*", "a capability in upper case, such as SYS_PTRACE")]
HostName = Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "a host name")]
HostAddress = Annotated[str, BeforeValidator(_host_address)]
# Values on #SBATCH lines, which do not support quoting
SbatchWord = Annotated[str, matching(r"[A-Za-z0-9_.:@%,/=+-]*", "one word")]
SbatchOption = Annotated[str, matching(r"--[!-~]+( [!-~]+)*", "an option of sbatch, such as --constraint=h100")]
