"""What counts as a line of code."""

import subprocess

SOURCE = '''"""A module's docstring,
on two lines."""

import os  # a comment beside code counts with the code


# a comment alone does not
class Thing:
    """A docstring."""

    text = """a string
    that is data"""

    def call(self):
        """Another."""
        return os.path.join(
            self.text,
        )
'''


def test_code_lines_leave_out_comments_and_docstrings(count_code):
    # import, class, two lines of data, def, three lines of return
    assert count_code.code_lines(SOURCE) == 8


def test_folder_of_a_file_at_a_depth(count_code):
    assert count_code.folder_of("setup.py", 1) == "."
    assert count_code.folder_of("a/b/c.py", 1) == "a"
    assert count_code.folder_of("a/b/c.py", 5) == "a/b"


def test_count_code_prints_a_table_of_tracked_files(count_code, tmp_path, capsys):
    for folder in ("tests", "tools"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "two.py").write_text("x = 1\n\ny = 2\n")
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "untracked.py").write_text("z = 3\n")
    for command in (["init", "-q"], ["add", "one.py", "tests", "tools"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    assert count_code.main(["--root", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [".", "1", "8"] in rows
    assert ["without", "tests", "and", "tools", "1", "8"] in rows
    assert rows[-1] == ["all", "3", "12"]
