"""The command line: what a user can get wrong ends in one sentence and a code."""

import dataclasses
import errno
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from experiments import cli, configs, first_help, train
from loka_jax import jsonfile, saved_format
from loka_jax.recipe import RECIPES
from loka_jax.train import session
from loka_jax.train.folder.workdir import choose_workdir
from loka_jax.train.watch.guard import TrainingFailed

GENERATED = ["--config", "fp8_dlrm_tiny"]
CSV = ["--config", "csv_dlrm_tiny", "--data.label", "click", "--data.categorical"]
CSV += ["user", "--data.dense", "age"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keeps the help that is kept out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def run(capsys):
    """Runs a command line; returns exit code, standard output and error."""

    def run(*arguments):
        try:
            code = train.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def assert_refused(result, *parts):
    """Asserts exit code 2 and one sentence on a line of its own."""
    code, _, err = result
    assert code == 2, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert err.endswith((".\n", "?\n")), err


def test_help_without_a_configuration_lists_them_and_ten_options(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    hidden = re.compile("bf16_.*|.*_tiny")
    large = [name for name in configs.names() if not hidden.fullmatch(name)]
    assert all(f"\n  {name} " in out for name in large)
    assert len(out.splitlines()) <= 48
    assert all(f" {name}" in out for name in RECIPES)


def test_help_shows_the_defaults_of_the_configuration(run):
    code, out, _ = run("--config", "frappe_dlrm", "--help")
    text = " ".join(out.split())
    assert code == 0
    assert "train.py --config frappe_dlrm" in out
    assert "(default: 100)" in text  # its epochs
    assert all(f"{name}," in text or f"{name}." in text for name in RECIPES)


def test_the_short_help_names_options_that_there_are(run):
    _, out, _ = run("--config", "csv_dlrm", "--help")
    short = first_help.short_help("tune.py") + first_help.short_help("probe.py")
    option = r"--[a-z][a-z.-]*[a-z]"
    missing = set(re.findall(option, short)) - set(re.findall(option, out))
    others = {"--option", "--table", "--tune", "--survey"}
    assert missing == others


def test_all_of_the_help_is_kept_until_a_source_changes(run, monkeypatch, capsys):
    _, out, _ = run("--config", "fp8_dlrm", "--help")
    with pytest.raises(SystemExit) as ended:
        first_help.first_help(["--config", "fp8_dlrm", "-h"], "train.py")
    assert ended.value.code == 0
    short = first_help.short_help("train.py")
    assert capsys.readouterr().out == f"{short}\n{out}"
    monkeypatch.setenv("COLUMNS", "77")
    assert first_help.kept_help("train.py", "fp8_dlrm") is None


LIGHT = """
import sys
from experiments.first_help import first_help
try:
    first_help(["--help"], "train.py")
finally:
    print(*sorted({"jax", "flax", "numpy", "tyro", "pyarrow"} & sys.modules.keys()))
"""


def test_the_short_help_imports_nothing_heavy():
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["--config NAME is missing: use one of bf16_dhen, "]),
        (["--config"], ["--config NAME is missing"]),
        (["--config", "--seed", "3"], ["--config NAME is missing"]),
        (["--config", "fp8_dlmr"], ["'fp8_dlmr': did you mean 'fp8_dlrm'?"]),
        (["--config=fp8_dlmr"], ["'fp8_dlmr': did you mean 'fp8_dlrm'?"]),
        ([*GENERATED, "--optm.lr", "1"], ["no option --optm.lr: did you mean --optim"]),
        (
            [*GENERATED, "--lr=1"],
            ["mean --optim.lr? python experiments/train.py"],
        ),
        (
            [*GENERATED, "--data.wait", "w"],
            ["--data.weight? python experiments/train.py"],
        ),
        ([*GENERATED, "--data.xyz", "w"], ["--data.xyz: there are --data.c"]),
        (["--confg", "fp8_dlrm"], ["did you mean --config by --confg?"]),
        (
            [*GENERATED, "--data.lable", "w"],
            ["did you mean --data.label or --data.labels? python experiments/train.py"],
        ),
        ([*GENERATED, "--loop.batch_sizes", "8"], ["did you mean --loop.batch-size"]),
        ([*GENERATED, "--norm", "layer", "rms"], ["'rms' belongs to no option"]),
        ([*GENERATED, "--optim.lr", "abc"], ["--optim.lr abc must be a number."]),
        (
            [*GENERATED, "--loop.batch-size", "1.5"],
            ["--loop.batch-size 1.5 must be an integer."],
        ),
        ([*GENERATED, "--data.rows", "3", "x"], ["--data.rows 3 x must be integers."]),
        (
            [*GENERATED, "--loop.max-steps", "x"],
            ["--loop.max-steps x must be None or an integer."],
        ),
        ([*GENERATED, "--loop.epochs"], ["--loop.epochs lacks its value: add one"]),
        (
            [*GENERATED, "--optim.dense", "adamm"],
            ["--optim.dense is 'adamm': did you mean 'adam'? Use one of a"],
        ),
        (
            [*GENERATED, "--dispatch.limits.healthy", "-1"],
            ["error: limits.healthy -1.0 must be positive."],
        ),
        ([*GENERATED, "--watchdog", "inf"], ["inf must be positive and at most 1,000"]),
        ([*GENERATED, "--optim.lr", "nan"], ["--optim.lr nan must lie between"]),
        ([*GENERATED, "--loop.batch-size", "-1"], ["-1 must be at least 1"]),
        ([*GENERATED, "--loop.batch-size", "99999999999"], ["must be at most"]),
        ([*GENERATED, "--recipe", "fp8_rowise"], ["did you mean 'fp8_rowwise'?"]),
        ([*GENERATED, "--seed", "-3"], ["--seed -3 must be in 0..2147483647"]),
        ([*GENERATED, "--dropout-rate", "1"], ["--dropout-rate 1.0 must be in [0, 1)"]),
        ([*GENERATED, "--data.rows", "5", "-1"], ["--data.rows (5, -1)"]),
        ([*GENERATED, "--profile", "x"], ["--profile 'x' must be START:STEPS"]),
        ([*GENERATED, "--data.path", "x"], ["--data.path is not used"]),
        ([*GENERATED, "--require-gpu"], ["--require-gpu was given, but JAX found"]),
        (CSV, ["needs --data.path"]),
        ([*CSV, "--data.path", "missing.csv"], ["missing.csv does not exist"]),
    ],
    ids=lambda x: " ".join(x)[-30:],
)
def test_a_bad_command_line_is_refused(run, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*arguments), *parts)
    assert not list(tmp_path.iterdir())


HEADER = "click,user,age\n"
ROWS = "".join(f"{i % 2},u{i % 7},{i}\n" for i in range(100))


@pytest.mark.parametrize(
    "content, options, parts",
    [
        ("", [], ["clicks.csv"]),
        (HEADER, [], ["clicks.csv"]),
        (HEADER + ROWS + "1,u1\n", [], ["clicks.csv", "row 101"]),
        ("a,b,c\n" + ROWS, [], ["clicks.csv has no column 'click', only a, b, c"]),
        (HEADER + ROWS + "2,u1,3\n", [], ["clicks.csv", "'click'", "2"]),
        (HEADER + ROWS + "1,u1,abc\n", [], ["clicks.csv", "'age'", "abc"]),
        (HEADER + ROWS + "1,u1,nan\n", ["--data.nan", "error"], ["'age'"]),
        (HEADER + ROWS + "1,u1,-1\n", ["--data.negative", "error"], ["'age'"]),
        (HEADER + ROWS + "1,u1,inf\n", ["--data.huge", "error"], ["'age'"]),
        (HEADER + ROWS, ["--data.categorical", "click"], ["'click'"]),
        (HEADER + ROWS, ["--data.valid", "nope.csv"], ["nope.csv does not exist"]),
    ],
    ids=["empty", "header", "short", "columns", "label", "text", "nan", "negative"]
    + ["inf", "twice", "valid"],
)
def test_bad_data_is_refused_and_leaves_nothing(run, tmp_path, content, options, parts):
    (tmp_path / "clicks.csv").write_text(content)
    places = ["--data.path", tmp_path / "clicks.csv", "--workdir", tmp_path / "run"]
    result = run(*CSV, *places, "--data.cache", tmp_path / "cache", *options)
    assert_refused(result, *parts)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "cache").glob("*"))


def test_a_model_without_categorical_columns_is_refused(run, tmp_path):
    (tmp_path / "clicks.csv").write_text(HEADER + ROWS)
    options = ["--data.label", "click", "--data.dense", "age", "--data.cache", tmp_path]
    path = ["--data.path", tmp_path / "clicks.csv", "--workdir", tmp_path / "run"]
    result = run("--config", "csv_dlrm_tiny", *path, *options)
    assert_refused(result, "needs at least one categorical column")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def no_data(monkeypatch):
    """Fails the test if data would be read."""
    monkeypatch.setattr(session, "build", lambda *_: pytest.fail("read the data"))


@pytest.mark.usefixtures("no_data")
def test_a_workdir_that_cannot_be_made_is_refused_before_the_data(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run(*GENERATED, "--workdir", tmp_path / "file" / "run")
    assert_refused(result, f"cannot write to {tmp_path}/file/run", "another --workdir")


@pytest.mark.usefixtures("no_data")
def test_a_workdir_that_may_not_be_written_is_refused(run, tmp_path, monkeypatch):
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "mkdir", lambda *_: _raise(refused))  # root may do anything
    assert_refused(run(*GENERATED, "--workdir", tmp_path / "run"), "cannot write to")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_data")
def test_a_workdir_that_holds_a_run_is_refused(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert_refused(run(*GENERATED, "--workdir", tmp_path), "continue it with --resume")


@pytest.mark.usefixtures("no_data")
def test_a_workdir_of_another_config_is_refused(run, tmp_path):
    content = json.dumps({saved_format.KEY: saved_format.RUN, "seed": 5})
    (tmp_path / "config.json").write_text(content)
    result = run(*GENERATED, "--workdir", tmp_path, "--resume")
    assert_refused(result, "holds a run with other options (--seed: saved 5, now 0; ")
    assert (tmp_path / "config.json").read_text() == content


@pytest.fixture
def workdir(tmp_path):
    """A folder with the configuration of a run."""
    config = configs.get_config("fp8_dlrm_tiny")
    config = dataclasses.replace(config, seed=7)
    saved = {saved_format.KEY: saved_format.RUN, **config.identity()}
    jsonfile.write(tmp_path / "config.json", saved)
    return tmp_path


def test_the_configuration_of_a_resumed_run_is_in_its_workdir(workdir):
    config = cli.parse(["--resume", "--workdir", str(workdir), "--loop.epochs", "3"])
    expected = configs.get_config("fp8_dlrm_tiny")
    loop = dataclasses.replace(expected.loop, epochs=3)
    run = dataclasses.replace(expected.run, resume=True, workdir=workdir)
    assert config == dataclasses.replace(expected, seed=7, loop=loop, run=run)


@pytest.mark.parametrize("joined", [False, True])
def test_the_home_folder_is_meant_by_a_tilde(workdir, monkeypatch, joined):
    monkeypatch.setenv("HOME", str(workdir.parent))
    value = f"~/{workdir.name}"
    option = [f"--workdir={value}"] if joined else ["--workdir", value]
    config = cli.parse(["--resume", *option])
    assert (config.seed, config.run.workdir) == (7, workdir)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    "options, parts",
    [
        (["--optim.lr", "0.5"], ["(--optim.lr: saved 0.002, now 0.5): leave these"]),
        (["--recipe", "bf16"], ["--recipe: saved 'fp8_", "now 'bf16'"]),
        (["--config", "bf16_dlrm_tiny"], ["--config: saved 'fp8_dlrm_tiny', now 'bf"]),
    ],
)
def test_an_option_that_may_not_change_is_refused_on_resume(
    run, workdir, options, parts
):
    result = run("--resume", "--workdir", workdir, *options)
    assert_refused(result, *parts, "or choose another --workdir")


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    "content, parts",
    [
        (None, ["holds no run to resume (config.json is missing)"]),
        ("{", ["config.json is not JSON"]),
        ("{}", ["an earlier version of loka_jax wrote it): train the run again"]),
        (
            f'{{"format": {saved_format.RUN}}}',
            ["config.json: model.kind is None, which is none of Dcnv2, Dhen, "],
        ),
    ],
)
def test_a_workdir_without_a_configuration_is_refused(run, tmp_path, content, parts):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert_refused(run("--resume", "--workdir", tmp_path), *parts)


def test_what_print_config_prints_is_a_configuration(run, tmp_path):
    options = ["--seed", "3", "--data.rows", "9", "8", "--norm", "layer"]
    _, printed, _ = run(*GENERATED, "--print-config", *options)
    (tmp_path / "mine.json").write_text(printed)
    code, again, _ = run("--config", tmp_path / "mine.json", "--print-config")
    assert (code, again) == (0, printed)
    _, other, _ = run(f"--config={tmp_path}/mine.json", "--print-config", "--seed", "4")
    assert other == printed.replace('"seed": 3', '"seed": 4')


@pytest.mark.parametrize(
    "name", ["fp8_dlrm", "fp8_dcnv2", "fp8_mmoe", "fp8_wukong", "fp8_dhen"]
)
def test_mods_are_options_of_every_model(name):
    mods = ["--no-bias", "--norm", "block", "--activation", "hard_swish"]
    model = cli.parse(["--config", f"{name}_tiny", *mods]).model
    plain = configs.get_config(f"{name}_tiny").model
    expected = plain.clone(bias=False, norm="block", activation="hard_swish")
    assert model == expected != plain


OWN = """
import dataclasses
from experiments.configs import get_config
from sibling import SEED

def my_dlrm():
    return dataclasses.replace(get_config("fp8_dlrm_tiny"), name="mine", seed=SEED)

def none():
    pass

def broken():
    return dataclasses.replace(my_dlrm(), seed=-1)

def bug():
    return 1 / 0
"""


@pytest.fixture
def own(tmp_path):
    """A user's file with configurations, and another file that it imports."""
    (tmp_path / "sibling.py").write_text("SEED = 11")
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_configuration_may_be_a_function_in_the_users_file(own):
    expected = configs.get_config("fp8_dlrm_tiny")
    expected = dataclasses.replace(expected, name="mine", seed=12)
    assert cli.parse(["--config", f"{own}:my_dlrm", "--seed", "12"]) == expected


@pytest.mark.parametrize(
    "function, parts",
    [
        ("my_dlmr", ["did you mean 'my_dlrm'?", "There are my_dlrm, none, broken"]),
        ("", ["own.py:FUNCTION must name a function", "There are my_dlrm"]),
        ("none", ["own.py:none returned a NoneType", "DlrmConfig"]),
        ("broken", ["own.py, line 13: --seed -1 must be in 0..2147483647"]),
        ("bug", ["own.py, line 16: ZeroDivisionError: division by zero"]),
    ],
)
def test_a_users_function_that_gives_no_configuration_is_refused(
    run, own, function, parts
):
    result = run("--config", f"{own}:{function}")
    assert_refused(result, *parts)


@pytest.mark.usefixtures("own")
def test_a_bug_in_a_file_of_a_relative_path_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(run("--config", "own.py:bug"), f"{tmp_path}/own.py, line 16: ZeroD")


def test_a_users_file_that_is_no_python_is_refused(run, tmp_path):
    (tmp_path / "own.py").write_text("x = 1\ndef f(:\n")
    result = run("--config", tmp_path / "own.py:f")
    assert_refused(result, f"{tmp_path}/own.py, line 2: SyntaxError: invalid syntax")
    missing = run("--config", tmp_path / "other.py:f")
    assert_refused(missing, "other.py: this file does not exist")


@pytest.mark.usefixtures("no_data")
def test_resuming_without_a_run_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*GENERATED, "--resume"), "there is no run runs/fp8_dlrm_tiny-")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_profile_after_the_last_step_is_refused(run, tmp_path):
    options = ["--profile", "99:2", "--data.examples", "256", "--data.rows", "9", "9"]
    result = run(*GENERATED, *options, "--workdir", tmp_path / "run")
    assert_refused(result, "--profile 99:2 starts after the run's last step 1")
    assert not (tmp_path / "run").exists()


def test_print_config_prints_json_and_does_nothing_else(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(*GENERATED, "--print-config", "--optim.lr", "3e-4")
    assert (code, '"lr": 0.0003' in out) == (0, True)
    assert out.startswith("{") and out.endswith("}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error, code, sentence",
    [
        (ValueError("x is 1: make it 2."), 2, "x is 1: make it 2."),
        (TrainingFailed("it diverged."), 1, "it diverged."),
        (OSError("step 3 could not be saved."), 1, "step 3 could not be saved."),
        (FileNotFoundError(2, "No such file", "a/b"), 1, "a/b: No such file"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
            1,
            "the device is out of memory: lower --loop.batch-size or --embedding.dim, "
            "or raise --loop.microbatches.",
        ),
    ],
)
def test_a_failure_is_one_sentence_and_a_code(capsys, error, code, sentence):
    def fail():
        raise error

    assert cli.run_cli(fail) == code
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(jax.errors.JaxRuntimeError):
        cli.run_cli(lambda: _raise(jax.errors.JaxRuntimeError("INTERNAL: x")))
    with pytest.raises(ZeroDivisionError):
        cli.run_cli(lambda: _raise(ZeroDivisionError()))


def test_an_error_cannot_write_to_the_terminal(capsys):
    name = "[/b] \x1b[2J\r\nerror: forged"
    assert cli.run_cli(lambda: _raise(ValueError(f"{name} does not exist."))) == 2
    shown = r"[/b] \x1b[2J\r\nerror: forged"
    assert capsys.readouterr().err == f"error: {shown} does not exist.\n"


def test_the_output_reads_brackets_as_text(capsys):
    session.standard_output().print("[/b] [bold]runs[/bold] :smile:")
    assert capsys.readouterr().out == "[/b] [bold]runs[/bold] :smile:\n"


def test_ctrl_c_outside_a_run_gives_130(capsys):
    assert cli.run_cli(lambda: _raise(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def _raise(error):
    raise error


def test_a_platform_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", lambda: _raise(AssertionError()))
    with pytest.raises(ValueError, match="JAX cannot run on JAX_PLATFORMS=cuda: inst"):
        session.device_notice(require_gpu=False)


def test_a_gpu_too_old_for_fp8_is_refused(monkeypatch):
    class Device:
        platform, device_kind, compute_capability = "gpu", "NVIDIA A100", "8.0"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ValueError, match="NVIDIA A100 has compute capability 8.0"):
        session.device_notice(require_gpu=True)


def test_runs_without_a_workdir_get_a_folder_each(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = configs.get_config("bf16_dlrm_tiny")
    first = choose_workdir(config)
    assert first == pathlib.Path("runs/bf16_dlrm_tiny-bf16-s0-1")
    first.mkdir(parents=True)
    assert choose_workdir(config).name == "bf16_dlrm_tiny-bf16-s0-2"


@pytest.mark.parametrize("asked, expected", [(None, "false"), ("true", "true")])
def test_memory_is_taken_as_needed_unless_asked_otherwise(monkeypatch, asked, expected):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name)  # the tests' own
    if asked is not None:
        monkeypatch.setenv(name, asked)
    found = []
    assert cli.run_cli(lambda: found.append(os.environ[name]) or 0) == 0
    assert found == [expected]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_is_told_with_a_remedy(capsys, number):
    def command():
        raise OSError(number, os.strerror(number))

    assert cli.run_cli(command) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {os.strerror(number)}: make room and run it again")
    assert said.count("\n") == 1
