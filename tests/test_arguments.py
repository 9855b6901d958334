"""Arguments from flags and from a YAML file that serves all three scripts; nothing misspelt passes in silence."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.arguments import parse
from common.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Arguments:
    model: str | None = field(default=None, metadata={"help": "a target"})
    max_length: int | None = field(default=None, metadata={"help": "in tokens"})
    data: list[str] = field(default_factory=list, metadata={"help": "files", "nargs": "+"})
    points: list[int] | None = field(default=None, metadata={"help": "capture points"})
    force: bool = field(default=False, metadata={"help": "go on"})


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_flags_win_over_the_section_and_the_section_over_nothing(yaml_file):
    path = yaml_file("model: shared\nextract:\n  max_length: 5\n  data: [a, b]\ntrain:\n  epochs: 3\n")
    arguments = parse(Arguments, "extract", [path, "--max-length", "7"])
    assert (arguments.model, arguments.max_length, arguments.data) == ("shared", 7, ["a", "b"])


def test_one_value_in_yaml_is_a_list_of_it_where_several_may_stand(yaml_file):
    arguments = parse(Arguments, "extract", [yaml_file("extract:\n  data: a.jsonl\n  points: 3\n")])
    assert arguments.data == ["a.jsonl"] and arguments.points == [3]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("extract:\n  max_lenght: 5\n", "section 'extract' has the unknown key max_lenght; did you mean max_length?"),
        ("max_length: 5\n", "the top level has the unknown key max_length"),
        ("- 1\n", "expected a mapping"),
        ("a: [\n", "not valid YAML"),
        ("extract: 5\n", "section 'extract' is 5, expected a mapping"),
        ("extract:\n  max_length: [5]\n", "section 'extract': max_length is [5], expected one value"),
        ("extract:\n  max_length: {a: 5}\n", "section 'extract': max_length is {'a': 5}, expected one value"),
        ("extract:\n  data: {a: b}\n", "section 'extract': data is {'a': 'b'}, expected a list or one value"),
        ("model: [a, b]\n", "the top level: model is ['a', 'b'], expected one value"),
    ],
)
def test_yaml_that_is_wrong(yaml_file, text, complaint):
    with pytest.raises(UserError) as caught:
        parse(Arguments, "extract", [yaml_file(text)])
    assert complaint in str(caught.value)


def test_unknown_flag_and_a_yaml_file_that_comes_too_late():
    with pytest.raises(UserError, match="unknown argument --modle; did you mean --model"):
        parse(Arguments, "extract", ["--modle", "x"])
    assert parse(Arguments, "extract", ["--model", "x.yml"]).model == "x.yml"
    with pytest.raises(UserError, match="unknown argument late.yaml; a YAML file comes first"):
        parse(Arguments, "extract", ["--force", "late.yaml"])
    with pytest.raises(UserError, match="a YAML file comes first"):
        parse(Arguments, "extract", ["--force", "true", "x.yaml"])
    with pytest.raises(UserError, match="/nowhere.yaml: cannot be read"):
        parse(Arguments, "extract", ["/nowhere.yaml"])


def test_a_rank_of_several_says_which_it_is_and_who_ended_first():
    def ends_with(what: str, **ranks) -> str:
        code = f"from common.errors import UserError, run\ndef main(): raise {what}\nrun(main)"
        environment = {name: each for name, each in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | ranks
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
        return f"{done.returncode} {done.stderr.strip().splitlines()[-1]}"

    two, lost = {"RANK": "1", "WORLD_SIZE": "2"}, "RuntimeError('[gloo] Connection closed by peer [::1]:7')"
    assert ends_with("UserError('a disk is full')") == "2 error: a disk is full"
    assert ends_with("UserError('a disk is full')", **two) == "2 error of rank 1: a disk is full"
    assert ends_with(lost, **two).startswith("2 error of rank 1: the connection to another rank broke; ")
    assert ends_with("RuntimeError('something else')", **two) == "1 RuntimeError: something else"
    assert ends_with(lost).startswith("1 RuntimeError")
