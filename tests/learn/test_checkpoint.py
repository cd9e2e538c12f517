import pytest
import torch

from upswing.errors import ConfigError
from upswing.learn import Learner, Schedule
from upswing.learn.checkpoint import STATE_FILE

from .helpers import random_rows, tiny


def learner(kind="llama", seed=0):
    schedule = Schedule(kind="cosine", warmup=1, total=10)
    return Learner(tiny(kind, seed), lr=3e-3, weight_decay=0.1, schedule=schedule, seed=5)


def train(one, first, last):
    for step in range(first, last):
        one.sft_update(random_rows(step))
        one.rl_update(random_rows(step), minibatches=2, updates_per_batch=2)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_resume_is_bit_identical(tmp_path, kind):
    straight = learner(kind)
    train(straight, 0, 4)
    stopped = learner(kind)
    train(stopped, 0, 2)
    stopped.save(tmp_path / "checkpoint")
    resumed = learner(kind, seed=9)
    resumed.load(tmp_path / "checkpoint")
    assert (resumed.version, resumed.updates, resumed.lr) == (stopped.version, stopped.updates, stopped.lr)
    train(resumed, 2, 4)
    assert resumed.version == straight.version == 8
    for name, tensor in straight.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_overwriting_leaves_one_whole_checkpoint(tmp_path):
    one, path = learner(), tmp_path / "checkpoint"
    one.save(path)
    train(one, 0, 1)
    one.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    other = learner()
    other.load(path)
    assert other.version == 2


def test_a_kill_while_saving_keeps_the_old_one(tmp_path, monkeypatch):
    one, path = learner(), tmp_path / "checkpoint"
    one.save(path)
    train(one, 0, 1)

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("upswing.learn.checkpoint.torch.save", killed)
    with pytest.raises(KeyboardInterrupt):
        one.save(path)
    monkeypatch.undo()
    other = learner()
    other.load(path)
    assert other.version == 0
    path.rename(tmp_path / "checkpoint.old")  # killed between the two renames
    other.load(path)
    one.save(path)
    other.load(path)
    assert other.version == 2


def test_is_a_hugging_face_folder(tmp_path):
    one = learner("qwen2")
    train(one, 0, 1)
    one.save(tmp_path / "c")
    model = type(one.model).from_pretrained(tmp_path / "c")
    assert (tmp_path / "c" / STATE_FILE).is_file()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, one.weights()[name])


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint at"):
        learner().load(tmp_path / "nowhere")
    Learner(tiny(hidden_size=16), lr=0.1).save(tmp_path / "small")
    with pytest.raises(ConfigError, match="of another model"):
        learner().load(tmp_path / "small")
