"""The one way into every job: Hydra composes, dataclasses check, errors become one line and an exit code.

0: done and accounted for. 1: failed. 2: refused for its configuration or input, before any work.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.usage import sections_of, usage
from pipeline.errors import Refused, WinnowError

CONF = Path(__file__).resolve().parent.parent / "conf"
T = TypeVar("T")


SCHEMAS: dict[str, tuple[type, Mapping[str, type]]] = {}


def register(name: str, schema: type, sections: Mapping[str, type] | None = None) -> None:
    """Make `schema` the type of conf/<name>.yaml. sections: classes of parts that config groups fill, for --help."""
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    SCHEMAS[name] = (schema, sections or {})


def launch(name: str, run: Callable[[DictConfig], None]) -> None:
    """Run the job `name`, configured by conf/<name>.yaml, and end the process with its exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us whole, and leave in one line
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    for noisy in ("httpx", "huggingface_hub", "ray", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    faulthandler.register(signal.SIGUSR1)
    sys.exit(_exit_code(name, run))


def _exit_code(name: str, run: Callable[[DictConfig], None]) -> int:
    codes = []
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage(CONF, name, str(sys.modules[run.__module__].__doc__), *SCHEMAS[name]))
        return 0

    def task(config: DictConfig) -> None:
        try:
            _refuse_unknown(config, SCHEMAS[name][0])
            run(config)
        except WinnowError as e:
            codes.append(_say(str(e), e.exit_code))
        except OmegaConfBaseException as e:
            codes.append(_say(_one_line(e), Refused.exit_code))
        except OSError as e:  # a full disk, no permission, no network
            codes.append(_say(str(e), WinnowError.exit_code))
        except KeyboardInterrupt:
            codes.append(
                _say("interrupted; what is finished is kept, the same command goes on from there", 1)
            )

    if odd := [a for a in sys.argv[1:] if not re.match(r"-|~\S|[+\w.@/]+=", a)]:
        return _say(f"{odd[0]}: must be KEY=VALUE; --help shows the keys", Refused.exit_code)
    sys.argv[1:] = [*(_quoted(a) for a in sys.argv[1:]), f"hydra.job.name={name}"]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(task)()
    except OverrideParseException as e:
        return _say(
            f"{e.override}: cannot be read; put the value in quotes, as in KEY='\"a, [b]\"'",
            Refused.exit_code,
        )
    except MissingConfigException as e:
        return _say(_no_choice(str(e.missing_cfg_file)), Refused.exit_code)
    except (HydraException, OmegaConfBaseException) as e:
        return _say(_one_line(e), Refused.exit_code)
    return max(codes, default=0)


def _refuse_unknown(node: DictConfig, schema: type, key: str = "") -> None:
    """`+key=value` adds to what is open, such as leakage.sets; a key that nothing would read is a slip."""
    for name in set(map(str, node)) - {f.name for f in fields(schema)}:
        raise Refused(f"{_dotted(key, name)}: there is no such key; --cfg job shows those there are")
    for name, kind in sections_of(schema):
        if not OmegaConf.is_missing(node, name) and isinstance(node[name], DictConfig):
            _refuse_unknown(node[name], kind, _dotted(key, name))


def _quoted(argument: str) -> str:
    """Paths may hold braces, brackets and commas, and uids look like numbers: not for Hydra's grammar to read."""
    if argument.startswith("uid="):
        return re.sub(r"(?<![\w\"'])([\da-fA-F]{32})(?![\w\"'])", r'"\1"', argument)
    return re.sub(r"^([\w.@+~/]+=)((?:/|\./|~/|\w+://).*)$", r'\1"\2"', argument)


def _no_choice(missing: str) -> str:
    group = (CONF / missing).parent
    choices = ", ".join(sorted(f.stem for f in group.glob("*.yaml")))
    return f"{missing}: there is no such choice; choose from {choices or 'nothing: no such group'}"


def _say(line: str, code: int) -> int:
    print(f"winnow: {line}", file=sys.stderr, flush=True)
    return code


def _one_line(error: Exception) -> str:
    """Hydra's message without its advice on stack traces, in one line."""
    if unknown := re.match(r"Could not override '([^']*)'", str(error)):
        return f"{unknown[1]}: there is no such key; --cfg job shows those there are"
    lines = [x.strip() for x in str(error).splitlines()]
    kept = [
        x for x in lines if x and not x.startswith(("object_type=", "reference_type=", "Set the environment"))
    ]
    text = "; ".join(kept).replace(":;", ":")
    cause = error.__cause__
    return (
        text
        if cause is None or str(cause).splitlines()[0] in text
        else f"{text} ({str(cause).splitlines()[0]})"
    )


def build(node: DictConfig, key: str, schema: type[T] | None = None) -> T:
    """A checked dataclass from a config node. Raises Refused naming `key` and the field."""
    try:
        if schema is not None:
            node = OmegaConf.merge(OmegaConf.structured(schema), node)  # type: ignore[assignment]
        for name, child in node.items_ex(resolve=False):  # each part by itself first, to name it in full
            if isinstance(child, DictConfig) and is_dataclass(OmegaConf.get_type(child)):
                build(child, _dotted(key, str(name)))
        missing = sorted(OmegaConf.missing_keys(node))
        if missing:
            raise Refused(f"{_dotted(key, missing[0])}: must be given")
        return OmegaConf.to_object(node)  # type: ignore[return-value]
    except OmegaConfBaseException as e:
        raise Refused(f"{_dotted(key, e.full_key)}: {_one_line(e).split(';')[0]}") from None
    except ValueError as e:
        raise Refused(_dotted(key, str(e))) from None


def _dotted(key: str, rest: str | None) -> str:
    rest = rest or ""
    last = key.rsplit(".", 1)[-1]
    if "." in key and rest.startswith(f"{last}."):  # told from the part's parent on
        rest = rest.removeprefix(f"{last}.")
    return rest if key and rest.startswith(f"{key}.") else f"{key}.{rest}".strip(".")


def build_target(node: Any, key: str, base: type) -> Any:
    """The object that a node's `_target_` names, built from its other keys. Raises Refused for any misfit."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise Refused(f"{key}: must be a mapping with a _target_, such as a file in conf/ gives")
    try:
        cls = hydra.utils.get_class(node._target_)
    except Exception as e:  # import of a user's class can fail in any way
        raise Refused(f"{key}._target_={node._target_}: {_one_line(e)}") from None
    if not issubclass(cls, base):
        raise Refused(f"{key}._target_={node._target_}: is not a {base.__name__}")
    fields = OmegaConf.create({k: v for k, v in plain(node).items() if k != "_target_"})
    return build(fields, key, cls)


def plain(config: DictConfig) -> dict[str, Any]:
    """The composed configuration as plain values, for receipts."""
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
