"""Arguments from flags and from a YAML file that serves all three scripts; nothing misspelt passes in silence."""

from dataclasses import dataclass, field

import pytest

from common.arguments import parse
from common.errors import UserError


@dataclass
class Arguments:
    model: str | None = field(default=None, metadata={"help": "a target"})
    max_length: int | None = field(default=None, metadata={"help": "in tokens"})
    data: list[str] = field(default_factory=list, metadata={"help": "files", "nargs": "+"})
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


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("extract:\n  max_lenght: 5\n", "section 'extract' has the unknown key max_lenght; did you mean max_length?"),
        ("max_length: 5\n", "the top level has the unknown key max_length"),
        ("- 1\n", "expected a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_yaml_that_is_wrong(yaml_file, text, complaint):
    with pytest.raises(UserError) as caught:
        parse(Arguments, "extract", [yaml_file(text)])
    assert complaint in str(caught.value)


def test_unknown_flag_and_a_yaml_file_that_comes_too_late():
    with pytest.raises(UserError, match="unknown argument --modle; did you mean --model"):
        parse(Arguments, "extract", ["--modle", "x"])
    with pytest.raises(UserError, match="a YAML file comes first"):
        parse(Arguments, "extract", ["--force", "true", "x.yaml"])
    with pytest.raises(UserError, match="/nowhere.yaml: cannot be read"):
        parse(Arguments, "extract", ["/nowhere.yaml"])
