"""One dataclass of arguments a script: from flags, from a YAML file, or both (flags win).

    python train_drafter.py configs/smollm2-135m.yaml --learning-rate 3e-4

A YAML file serves all three scripts. A few keys are shared and stand at its top level (`SHARED`); the sections
`extract`, `train` and `eval` hold the keys of one script. An unknown key or flag is an error.
"""

import argparse
import copy
import dataclasses
import difflib
import sys
from pathlib import Path
from typing import TypeVar, get_args, get_origin, get_type_hints

import yaml
from transformers import HfArgumentParser

from common.errors import UserError

SECTIONS = ("extract", "train", "eval")
SHARED = ("model", "device", "seed", "tp", "trust_remote_code", "engine_args")  # keys that may stand at the top level
Arguments = TypeVar("Arguments")


class HelpLayout(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """--help: the script's docstring as it is written; each argument under one name, with its default if it has one."""

    def _format_action_invocation(self, action):
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name][:2]
        return super()._format_action_invocation(shown if shown.option_strings else action)

    def _get_help_string(self, action):
        if isinstance(action, argparse._StoreFalseAction):
            return f"Switch it off: {action.help}"
        return action.help if action.default is None else super()._get_help_string(action)


def parse(
    arguments_class: type[Arguments], section: str, argv: list[str] | None = None, description: str = ""
) -> Arguments:
    """Parse `argv` (default: the command line) into `arguments_class`.

    The first argument may name a YAML file; its values become defaults, so flags override them.
    Raises `UserError` for a YAML file that cannot be read or holds an unknown key.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    usage = "%(prog)s [CONFIG.yaml] [--ARGUMENT VALUE ...]"
    parser = HfArgumentParser(arguments_class, usage=usage, description=description, formatter_class=HelpLayout)
    switches = {flag for action in parser._actions if action.nargs == "?" for flag in action.option_strings}
    for before, late in zip(argv, argv[1:], strict=False):  # a switch would take it for its value
        if late.endswith((".yaml", ".yml")) and (before in switches or not before.startswith("-")):
            raise UserError(f"unknown argument {late}; a YAML file comes first, and there is one at most")
    if argv and argv[0].endswith((".yaml", ".yml")):
        values = read_yaml(Path(argv.pop(0)), section, get_type_hints(arguments_class))
        for action in parser._actions:
            if action.dest in values:
                action.required = False
        parser.set_defaults(**values)
    arguments, *_, unknown = parser.parse_args_into_dataclasses(
        args=argv, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0], known, n=1)
        advice = f"; did you mean {near[0]}?" if near else "; see --help"
        raise UserError(f"unknown argument {unknown[0]}{advice}")
    return arguments


def read_yaml(path: Path, section: str, known: dict) -> dict:
    """The values of `path` that concern one script: the shared keys it knows and its own section.

    known: the type of each argument. One value for an argument that takes several becomes a list of it.
    """
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give an existing YAML file") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of argument names to values, found {type(content).__name__}")
    own = content.pop(section, None) or {}
    if not isinstance(own, dict):
        raise UserError(f"{path}: section '{section}' is {own!r}, expected a mapping of argument names to values")
    for other in SECTIONS:
        content.pop(other, None)
    for where, names, allowed in ((f"section '{section}'", own, set(known)), ("the top level", content, set(SHARED))):
        if unknown := sorted(set(names) - allowed, key=str):
            near = difflib.get_close_matches(str(unknown[0]), allowed, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(allowed))}"
            if not near and names is content:
                advice += f"; the keys of one script stand in its section: {', '.join(SECTIONS)}"
            raise UserError(f"{path}: {where} has the unknown key {unknown[0]}; {advice}")
        for key in set(names) & set(known):
            several, value = any(get_origin(kind) is list for kind in (known[key], *get_args(known[key]))), names[key]
            if isinstance(value, dict) or (isinstance(value, list) and not several):
                expected = "a list or one value" if several else "one value"
                expected += ", a JSON object in quotes" if key == "engine_args" else ""
                raise UserError(f"{path}: {where}: {key} is {value!r}, expected {expected}")
            if several and value is not None and not isinstance(value, list):
                names[key] = [value]
    shared = {key: value for key, value in content.items() if key in known}
    return {**shared, **own}


def as_dict(arguments) -> dict:
    """The resolved arguments as plain JSON values, to be saved beside every output."""
    return {
        key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(arguments).items()
    }
