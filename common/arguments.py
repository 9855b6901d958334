"""One dataclass of arguments a script: from flags, from a YAML file, or both (flags win).

    python train_drafter.py configs/smollm2-135m.yaml --learning-rate 3e-4

A YAML file serves all three scripts. Keys at its top level are shared: each script takes those that it knows. The
sections `extract`, `train` and `eval` hold the keys of one script. A key that no script knows is an error.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TypeVar

import yaml
from transformers import HfArgumentParser

from common.errors import UserError

SECTIONS = ("extract", "train", "eval")
Arguments = TypeVar("Arguments")


class HelpLayout(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help: the script's docstring as it is written, and the default of each argument."""


def parse(
    arguments_class: type[Arguments], section: str, argv: list[str] | None = None, description: str = ""
) -> Arguments:
    """Parse `argv` (default: the command line) into `arguments_class`.

    The first argument may name a YAML file; its values become defaults, so flags override them.
    Raises `UserError` for a YAML file that cannot be read or holds an unknown key.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(arguments_class, description=description, formatter_class=HelpLayout)
    if argv and argv[0].endswith((".yaml", ".yml")):
        values = read_yaml(Path(argv.pop(0)), section, {field.name for field in dataclasses.fields(arguments_class)})
        for action in parser._actions:
            if action.dest in values:
                action.required = False
        parser.set_defaults(**values)
    (arguments,) = parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
    return arguments


def read_yaml(path: Path, section: str, known: set[str]) -> dict:
    """The values of `path` that concern one script: the shared keys it knows and its own section."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give an existing YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of argument names to values, found {type(content).__name__}")
    own = content.pop(section, None) or {}
    for other in SECTIONS:
        content.pop(other, None)
    unknown = sorted(set(own) - known)
    if unknown:
        raise UserError(f"{path}: section '{section}' has unknown keys {unknown}; known: {sorted(known)}")
    shared = {key: value for key, value in content.items() if key in known}
    return {**shared, **own}


def as_dict(arguments) -> dict:
    """The resolved arguments as plain JSON values, to be saved beside every output."""
    return {
        key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(arguments).items()
    }
