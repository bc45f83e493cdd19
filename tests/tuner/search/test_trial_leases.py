"""One trial has a configuration; where a study is kept is remembered; half lines do no harm."""

import threading

import optuna
import pytest

from slo_bench.harness.results.run_checkpoint import cut_half_a_line
from slo_bench.tuner.search.storage import (
    JOURNAL,
    StudyLocation,
    open_storage,
    study_location,
    without_password,
)
from slo_bench.tuner.search.study_results import OWNER, SAME_AS, note
from slo_bench.tuner.search.trial_leases import alive, claim, new_name
from slo_bench.workloads.errors import SloBenchError


@pytest.fixture
def study(tmp_path):
    return optuna.create_study(storage=open_storage(None, tmp_path), study_name="s")


def begun_trial(study, name):
    trial = study.ask()
    note(trial, OWNER, name)
    return trial


def test_lease_goes_to_the_first_trial_of_a_configuration(study):
    with alive(study, name := new_name()):
        first, second, third = (begun_trial(study, name) for _ in range(3))
        assert claim(study, first, "a") is None
        assert claim(study, second, "a").number == first.number
        assert claim(study, third, "b") is None
        assert claim(study, first, "a") is None  # again, after a cut


def test_lease_of_a_begun_trial_is_kept_from_a_lower_number(study):
    with alive(study, name := new_name()):
        first, second = begun_trial(study, name), begun_trial(study, name)
        study._storage.set_trial_state_values(first._trial_id, optuna.trial.TrialState.WAITING)
        assert claim(study, second, "a") is None  # nobody waits for one that is not in hand
        again = study.ask()
        assert again.number == first.number
        assert claim(study, again, "a").number == second.number


def test_lease_of_concurrent_trials_goes_to_exactly_one(study):
    name, has = new_name(), {}
    with alive(study, name):
        trials = [begun_trial(study, name) for _ in range(6)]

        def claim_key(trial):
            has[trial.number] = claim(study, trial, f"key {trial.number % 2}")
            if has[trial.number] is not None:
                trial.set_user_attr(SAME_AS, has[trial.number].number)

        threads = [threading.Thread(target=claim_key, args=(trial,)) for trial in reversed(trials)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(number for number, other in has.items() if other is None) == [0, 1]


@pytest.mark.parametrize("tail", [b"", b"x", b'{"op_code": 4, "wor' * 1000])
@pytest.mark.parametrize("whole", [b"", b'{"a": 1}\n', b'{"a": 1}\n{"b": 2}\n' * 1000])
def test_journal_repair_cuts_only_the_unfinished_line(tmp_path, whole, tail):
    path = tmp_path / "f"
    path.write_bytes(whole + tail)
    with path.open("r+b") as file:
        cut_half_a_line(file)
        assert file.read() == whole
    assert path.read_bytes() == whole


def test_journal_with_an_unfinished_line_is_continued(study, tmp_path):
    study.ask()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    again = optuna.load_study(study_name="s", storage=open_storage(None, tmp_path))
    again.ask()
    read = optuna.storages.journal.JournalFileBackend(str(tmp_path / JOURNAL))
    anybody = optuna.storages.JournalStorage(read)
    assert len(optuna.load_study(study_name="s", storage=anybody).trials) == 2


def test_study_folder_remembers_its_storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    place = study_location(here, "postgresql+psycopg://me:secret@host/db", "mine", resume=False)
    place.write(here)
    assert "secret" not in (here / "study.json").read_text()
    assert study_location(here, None, None, resume=True) == StudyLocation(
        "postgresql+psycopg://me@host/db", "mine"
    )
    assert study_location(here, place.storage, "mine", resume=True) == place
    with pytest.raises(SloBenchError, match=r"is kept in .*me@host/db, not in sqlite:///"):
        study_location(here, "sqlite:///x.db", None, resume=True)
    with pytest.raises(SloBenchError, match="is mine, not yours"):
        study_location(here, None, "yours", resume=True)
    assert (
        study_location(here, "sqlite:///x.db", None, resume=False).storage
        == f"sqlite:///{tmp_path}/x.db"
    )
    assert study_location(here, "x.journal", None, resume=False).storage == str(
        tmp_path / "x.journal"
    )
    (here / "study.json").write_text("{}")
    with pytest.raises(SloBenchError, match=r"cannot be read.*study.json"):
        study_location(here, None, None, resume=True)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h/d?password=q&host=/s", "postgresql://u@h/d?host=%2Fs"),
        ("redis://:p@h:6379", "redis://@h:6379"),
        ("postgresql://h/d?sslpassword=q", "postgresql://h/d"),
        ("mysql://h/d?passwd=q&charset=x", "mysql://h/d?charset=x"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("a/b.journal", "a/b.journal"),
    ],
)
def test_without_password_hides_the_password(url, shown):
    assert without_password(url) == shown
