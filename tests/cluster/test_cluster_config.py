"""What is refused before anything starts, and the plan of `--dry-run`."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.learn.helpers import row, tiny
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from upswing.cli.main import app
from upswing.cluster import actors
from upswing.cluster.actors import check_room, connect, room_here
from upswing.cluster.engines import EngineActor, RayEngines, Received
from upswing.cluster.ranks import RankActor
from upswing.cluster.worlds import RemoteRubric, Workers, WorldActor
from upswing.engine.base import Completion, EngineStats, FinishReason, Sampling
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.learn import Learner
from upswing.learn.activations import Fits
from upswing.learn.precision import compute_context
from upswing.models.attention import use_upswing_attention
from upswing.recipe import ClusterSection, check_same, load_recipe
from upswing.rollout.collect import judge
from upswing.stages.placement import _fits, _sized, _weight_bytes, _whole_bytes, plan
from upswing.stages.preflight import learner_bytes
from upswing.trajectory.types import Message, Outcome, StopReason, Task, Trajectory
from upswing.verify import rubric_from
from upswing.verify.deadline import call_env

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.engines=2"], "cluster.engines: got 2 without effect: kind is local; add kind: ray"),
        (["cluster.kind=rya"], "cluster.kind: got 'rya'"),
        (["cluster.kind=ray", "cluster.engine_gpus=1.5"], "got 1.5; allowed: a share of one GPU, or whole ones"),
        (["cluster.kind=ray", "cluster.env_cpus=2"], "cluster.env_cpus: got 2 without effect: env_workers is 0"),
        (["cluster.kind=ray", "cluster.learner_cpus=2"], "learner_cpus: got 2 without effect: learners is 1"),
        (["cluster.kind=ray", "cluster.address='ray://h:1'"], "Ray's client"),
        (
            ["cluster.kind=ray", "engine={kind: vllm, url: 'http://h:1'}"],
            "engine.kind: got 'vllm', but cluster.kind ray starts embedded engines; allowed: torch",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe(TINY, overrides)


def test_a_run_may_go_on_elsewhere() -> None:
    check_same(load_recipe(TINY), load_recipe(TINY, ["cluster={kind: ray, engines: 4}"]), Path("run"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"address": "127.0.0.1:9"}, "cluster.address: no Ray cluster answers at '127.0.0.1:9' (ConnectionRefused"),
        ({"engines": 3, "engine_gpus": 64}, "cluster: 192 GPUs are needed, but there are"),
    ],
)
def test_what_is_not_there_is_named(section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        connect(ClusterSection(kind="ray", **section))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'upswing\[ray\]'"):
        connect(ClusterSection(kind="ray"))


def test_the_plan_says_what_is_where() -> None:
    more = ["cluster.engines=3", "cluster.engine_gpus=0", "cluster.env_workers=2", "rl.kl_coef=0.1"]
    shown = CliRunner().invoke(app, ["run", str(TINY), *more, "engine.dtype=float32", "--cluster", "ray", "--dry-run"])
    assert shown.exit_code == 0, shown.output
    said = [line[2:] for line in shown.stdout.splitlines() if line.startswith("# ")]
    assert re.match(r"Ray, started on this machine: \d+ CPUs", said[0])
    # 2 layers x 2 x 2 key heads x 16 x 4 bytes a token; 64 slots of 256 tokens.
    assert said[1].startswith("engines: 3, each 1 CPU; ") and "keys and values 0.00839 (64 x 256 tokens)" in said[1]
    assert said[2] == "env workers: 2, each 1 CPU; verifiers are there, too"
    assert "the policy's weights, gradients and moments" in said[4] and "the reference" in said[4]
    assert "kind: ray" in shown.stdout
    assert list(plan(load_recipe(TINY)))[1].startswith("engine: in the process of the run; ")


TWO_BIG = [{"CPU": 8.0, "GPU": 2.0, "memory": 1.0}] * 2


@pytest.mark.parametrize(
    ("section", "nodes", "message"),
    [
        ({"engines": 4, "engine_gpus": 1}, TWO_BIG, None),
        ({"engines": 1, "engine_gpus": 4}, TWO_BIG, "no node has the 1 CPU + 4 GPUs that must be on one (pack); there"),
        (
            {"engines": 3, "placement": "strict_pack"},
            TWO_BIG,
            "no node has the 3 CPUs + 3 GPUs that must be on one (st",
        ),
        ({"engines": 2, "placement": "strict_pack"}, TWO_BIG, None),
        ({"engines": 2, "env_workers": 1, "placement": "strict_spread"}, TWO_BIG, "each of 3 actors on a node of its"),
        ({"engines": 2, "placement": "strict_spread"}, TWO_BIG, None),
        ({"engines": 17, "engine_gpus": 0}, TWO_BIG, "17 CPUs are needed, but there are 16; use less of: engines, env"),
        ({"engines": 1}, [{}], "1 CPUs are needed, but there are 0"),
    ],
)
def test_what_no_node_has_is_refused_at_once(section: dict[str, Any], nodes: Any, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ConfigError, match=re.escape(message)):
        check_room(ClusterSection(kind="ray", **section), nodes)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert room_here(ClusterSection(kind="ray", learners=2))["GPU"] == 1
    assert room_here(ClusterSection(kind="ray"))["GPU"] == 1, "the learner's GPU is no engine's"
    with pytest.raises(ConfigError, match=r"cluster\.learners: got 3, but each takes a GPU, and this machine has 2"):
        room_here(ClusterSection(kind="ray", learners=3))


# -- what stays behind, and what is sent: the parts of Ray that take part are stood in for ----------------------------


class FakeRay:
    """One node, at whose address nobody answers, and an object store."""

    class exceptions:
        RayError = RayTaskError = UnserializableException = KeyError

    put = staticmethod(lambda array: array)
    kill = staticmethod(lambda actor: actor.killed.set())

    def __init__(self) -> None:
        self.ended = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 9.0}}]

    def shutdown(self) -> None:
        self.ended += 1


def test_a_connection_is_ended_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setattr(actors, "connect", lambda section: (ray, True))
    with pytest.raises(ConfigError, match="2 CPUs are needed, but there are 1"):
        actors.Cluster(ClusterSection(kind="ray", engines=2), print)
    assert ray.ended == 1


class Method:
    """Of an actor; what it returns is awaited."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class FakeEngine:
    """Samples its own number, slowly. One that hangs only begins."""

    def __init__(self, number: int, hangs: bool, dtype: torch.dtype) -> None:
        self.given: list[tuple[dict[str, torch.Tensor], int]] = []
        self.killed = asyncio.Event()

        async def answer() -> None:
            if hangs:
                await self.killed.wait()
                raise OSError("it was killed")

        async def load(weights: dict[str, Any], version: int) -> None:
            await answer()
            self.given.append((dict(Received(weights)), version))

        async def generate(*args: Any) -> tuple[Completion, EngineStats]:
            await answer()
            await asyncio.sleep(0.3)
            done = {"tokens": (number,), "engine_logprobs": (0.0,), "policy_version": (0,)}
            return Completion(**done, finish_reason=FinishReason.LENGTH), EngineStats()

        async def begin() -> dict[str, Any]:
            return {"kv_tokens": 10, "max_request": 5, "weights": dtype}

        for method in (answer, load, generate, begin):
            setattr(self, method.__name__, Method(method))


def at_once(answer: Any) -> Any:
    """What a coroutine returns that waits for nothing."""
    with pytest.raises(StopIteration) as end:
        answer.send(None)
    return end.value.value


class FakeCluster(actors.Cluster):
    """Whose actors are engines; the first `bad` of them hang."""

    def __init__(self, engines: int, bad: int, *dtypes: torch.dtype) -> None:
        self.section, self.ray, self.closed = ClusterSection(kind="ray", engines=engines), FakeRay(), 0
        self._gone, self._why, self.warned = asyncio.Event(), "", list[str]()
        self.warn = self.warned.append
        self.made = [FakeEngine(n, n < bad, dtypes[n % len(dtypes)]) for n in range(engines + 1)]
        self.left = iter(self.made)

    def start(self, kind: type, place: int, *args: Any) -> Any:
        return next(self.left)

    def wait(self, answers: Any) -> list[Any]:
        return [at_once(answer) for answer in answers]

    async def check(self) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1


def test_nothing_stays_behind_when_an_engine_can_not_start() -> None:
    cluster = FakeCluster(2, 0, torch.float32)
    cluster.left = iter(cluster.made[:1])
    with pytest.raises(StopIteration):
        RayEngines(cluster, "tiny")
    assert cluster.closed == 1


@pytest.mark.parametrize("held", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)])
def test_weights_are_sent_as_engines_hold_them(held: tuple[torch.dtype, ...]) -> None:
    """As many bytes, and the values that an engine in this process would make of them; float32 where one holds that."""
    cluster = FakeCluster(2, 0, *held)
    engines = RayEngines(cluster, "tiny")
    torch.manual_seed(0)
    weights = {"a": torch.randn(7, 3).T, "b": torch.tensor(1 / 3), "c": torch.tensor([torch.inf, torch.nan, 1e-40])}
    asyncio.run(engines.update_weights(weights, 1))
    wide = torch.float32 in held
    assert engines.stats.weight_bytes == (4 if wide else 2) * (7 * 3 + 1 + 3), "once, for however many engines"
    assert {name: array.nbytes for name, array in engines._weights.items()} == {
        name: tensor.numel() * (4 if wide else 2) for name, tensor in weights.items()
    }
    for engine in cluster.made[:2]:
        [(given, version)] = engine.given
        assert version == 1 and given.keys() == weights.keys()
        for name, tensor in weights.items():
            own = torch.empty(tensor.shape, dtype=torch.float32 if wide else torch.bfloat16)
            torch.testing.assert_close(given[name], own.copy_(tensor), rtol=0, atol=0, equal_nan=True)


async def test_an_engine_that_hangs_over_weights_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upswing.cluster.engines.START_S", 0.1)
    cluster = FakeCluster(2, 1, torch.float32)
    engines = RayEngines(cluster, "tiny")
    await engines.update_weights({"a": torch.ones(2)}, 7)
    assert engines.version == 7
    member = engines.pool.members[0]
    assert member.task is not None
    await member.task
    assert member.up and member.actor is cluster.made[2] and [v for _, v in cluster.made[2].given] == [7]
    assert cluster.warned == ["engine 1 of 2 is replaced: it took longer than 0.1 s to load weights"]
    await engines.close()
    engines.pool.lose(engines.pool.members[1], cluster.made[1], "closed")
    assert cluster.closed == 1 and engines.pool.members[1].task is None, "nobody is replaced after the end"


@pytest.mark.parametrize("hangs", [True, False])
async def test_an_engine_that_hangs_over_a_request_is_replaced(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only takes longer than the deadline for a sign of life isn't."""
    monkeypatch.setattr(actors, "ANSWER_S", 0.05)
    monkeypatch.setattr(actors, "BEAT_S", 0.01)
    cluster = FakeCluster(1, int(hangs), torch.float32)
    engines = RayEngines(cluster, "tiny", turn_timeout_s=0.2)
    done = await asyncio.wait_for(engines.generate([1], Sampling(max_tokens=1)), 5)
    assert done.tokens == (int(hangs),)
    assert cluster.warned == ["engine 1 of 1 is replaced: it has not answered for 0.1 s"] * hangs
    watch = engines.pool.members[0].watch
    await asyncio.wait_for(asyncio.wait([watch]), 5)
    await engines.close()


async def test_a_replacement_that_never_starts_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "ANSWER_S", 0.05)
    monkeypatch.setattr(actors, "START_S", 0.05)
    monkeypatch.setattr(actors, "DEATHS", 2)
    cluster = FakeCluster(1, 1, torch.float32)
    engines = RayEngines(cluster, "tiny", turn_timeout_s=0.1)
    for late in (spare := [FakeEngine(9, True, torch.float32) for _ in range(2)]):
        late.begin = late.answer
    cluster.left = iter(spare)
    waits = asyncio.ensure_future(engines.generate([1], Sampling(max_tokens=1)))
    await asyncio.wait_for(cluster._gone.wait(), 5)
    assert cluster._why == "no engine stays alive (the last: it took longer than 0.05 s to start)"
    waits.cancel()
    await engines.close()


# -- workers under load: only Ray is stood in for ---------------------------------------------------------------------


class Slow(Environment):
    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(messages=task.messages)

    def step(self, message: AssistantMessage) -> Observation:
        time.sleep(0.2 if message.content == "slowly" else 5.0)
        return Observation(done=True)


def slow(messages: tuple[Message, ...]) -> float:
    time.sleep(0.2 if messages else 5.0)
    return 1.0


class OneWorker(FakeCluster):
    """Whose actor is a real WorldActor; its calls are tasks of another process, as it were: no clock comes along."""

    def __init__(self, env_workers: int) -> None:
        super().__init__(1, 0, torch.float32)
        self.section = ClusterSection(kind="ray", env_workers=env_workers).model_copy(update={"engines": 0})

    def start(self, kind: type, place: int, *args: Any) -> Any:
        actor = kind(*args)

        async def told(work: Any) -> Any:
            try:
                return await work
            except Exception as problem:
                error = FakeRay.exceptions.RayTaskError()
                error.cause = problem
                raise error from problem

        def apart(name: str) -> Method:
            def call(*args: Any) -> Any:
                work = told(getattr(actor, name)(*args))
                return work if name == "begin" else asyncio.Task(work, context=contextvars.Context())

            return Method(call)

        return SimpleNamespace(**{name: apart(name) for name in ("begin", "play", "answer", "score")})


async def test_waiting_for_a_thread_in_a_worker_takes_no_time_off_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one process. Five calls of 0.2 s each, one after the other, have 0.6 s each."""
    monkeypatch.setattr("upswing.verify.deadline.MAX_PER_FUNCTION", 1)
    limits = {"context_tokens": 256, "env_timeout_s": 0.6, "scoring_timeout_s": 0.6}
    changes = [f"env={__name__}:Slow", f"verifiers=['{__name__}:slow']", f"limits={json.dumps(limits)}"]
    recipe = load_recipe(TINY, changes)
    workers = Workers(OneWorker(1), recipe)

    async def stepped(words: str) -> Any:
        env = workers.make_env()
        await env.reset(Task(id="t", messages=()), 0)
        return await call_env(env.step, AssistantMessage(content=words), timeout_s=0.6)

    assert all(seen.done for seen in await asyncio.gather(*(stepped("slowly") for _ in range(5))))
    with pytest.raises(EnvironmentBroken, match=r"step took longer than 0\.6 s"):
        await stepped("too slowly")

    rubric = RemoteRubric(rubric_from(recipe.verifiers), workers)

    async def judged(*messages: Message) -> Any:
        end = {"outcome": Outcome.COMPLETED, "stop_reason": StopReason.ANSWERED}
        task = Task(id="t", messages=())
        return await judge(Trajectory(id="t", task=task, branches=(), messages=messages, **end), rubric, 0.6)

    said = Message(role="assistant", content="b")
    assert [one.value for one in await asyncio.gather(*(judged(said) for _ in range(5)))] == [1.0] * 5
    late = await judged()
    assert late.value is None and "longer than 0.6 s" in late.reason
    workers.pool.close()


@pytest.mark.parametrize(("kind", "many"), [(WorldActor, True), (EngineActor, True), (RankActor, False)])
def test_a_sign_of_life_does_not_wait_behind_a_thousand_calls(kind: type, many: bool, monkeypatch: Any) -> None:
    """Of an actor with threads, which has no `answer`, Ray would start as many as calls may run."""
    given: dict[str, Any] = {}
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, place: None)
    monkeypatch.setattr(actors, "library", lambda *names: strategies)
    cluster = FakeCluster(1, 0, torch.float32)
    cluster.places, cluster._group = [{"CPU": 1.0}], None
    cluster.ray = SimpleNamespace(
        remote=lambda kind: SimpleNamespace(
            options=lambda **options: given.update(options) or Method(lambda *args: None)
        )
    )
    actors.Cluster.start(cluster, kind, 0)
    assert given["num_cpus"] == 1 and (given.get("max_concurrency", 1) > 50_000) is many


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_plan_counts_torchruns_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(plan(load_recipe(TINY)))[-1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert " a rank: " in list(plan(load_recipe(TINY)))[-1] and " a rank" not in alone


def test_weights_of_a_plan_are_those_of_the_run(tmp_path: Path) -> None:
    """A learner's are float32 whatever the config says. Of an engine in int8 only the products are."""
    hidden, inner, layers, vocab = 256, 704, 5, 300
    for tied in (False, True):
        models()["llama"][1].save_pretrained(tmp_path)
        config = LlamaConfig.from_pretrained(tmp_path, tie_word_embeddings=tied)
        config.save_pretrained(tmp_path)
        model = _sized(str(tmp_path))
        products = layers * (hidden * (2 * hidden + 2 * hidden // 2) + 3 * hidden * inner)
        norms, head = hidden * (2 * layers + 1), 0 if tied else vocab * hidden
        assert sum(p.nbytes for p in model.parameters()) == 4 * (products + norms + vocab * hidden + head)
        assert _weight_bytes(model, torch.bfloat16, int8=False) == 2 * (products + norms + vocab * hidden + head)
        # A tied embedding stays for the look-up, beside the head's product.
        assert _weight_bytes(model, torch.bfloat16, int8=True) == products + vocab * hidden + 2 * (
            norms + vocab * hidden
        )
        layer = products / layers + 2 * hidden
        assert _whole_bytes(model) == 4 * (3 * layer + 2 * (vocab * hidden + head + hidden))


def most_held(work: Any, sizes: set[int]) -> int:
    """Bytes that `work` has allocated at once in tensors of these sizes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    found: list[tuple[int, int]] = []
    left = list(seen.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation and abs(event.extra_fields.alloc_size) in sizes:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(itertools.accumulate((size for _, size in sorted(found)), initial=0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recomputed", [False, True])
def test_weights_in_16_bits_are_what_an_update_holds(tied: bool, recomputed: bool) -> None:
    """Of two packs, so that all gradients are there beside them; in float32 there are none."""
    changes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "vocab_size": 1024}
    changes["num_key_value_heads"] = 1  # so that no tensor in 32 bits has the size of one of these
    model = tiny(tie_word_embeddings=tied, **changes)
    model.get_input_embeddings().padding_idx = None  # as in load_model
    one = load_recipe(TINY, [f"rl.gradient_checkpointing={str(recomputed).lower()}"])
    learner = Learner(
        model, lr=1e-3, compute_dtype=torch.bfloat16, gradient_checkpointing=recomputed, max_tokens_per_pack=30
    )
    rows = [row(range(3, 15), range(4, 12), advantage=float(-((-1) ** i)), group=i // 2) for i in range(4)]
    matrices = {p.numel() for p in model.parameters() if p.ndim == 2}
    held = most_held(lambda: learner.rl_update(rows), {2 * count for count in matrices})
    said = {
        dtype: learner_bytes(one, one.stages[1], model, Fits(), dtype, "cpu")["weights in 16 bits"]
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert said[torch.float32] == 0
    # A matrix' gradient is in 16 bits before it is added up, so one or two more are there.
    assert said[torch.bfloat16] * 0.98 < held < said[torch.bfloat16] + 2 * 2 * max(matrices)


def models() -> dict[str, tuple[Any, Any]]:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    llama = LlamaConfig(**shape, intermediate_size=704, num_hidden_layers=5, dtype="bfloat16")
    qwen = Qwen2Config(**shape, intermediate_size=512, num_hidden_layers=3)
    return {"llama": (LlamaForCausalLM, llama), "qwen2": (Qwen2ForCausalLM, qwen)}


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_known_without_weights(name: str, dtype: torch.dtype) -> None:
    """As they are measured on the model itself, which the plan doesn't make."""
    kind, config = models()[name]
    model = kind(config)
    use_upswing_attention(model)
    measured = Fits.measure(model, lambda: compute_context("cpu", dtype), 1.0)
    found = _fits(config, dtype)
    assert found is not None
    assert found.kept == pytest.approx(measured.kept, rel=0.05)
    assert found.recomputed == pytest.approx(measured.recomputed, rel=0.05)


def test_a_plan_of_a_model_whose_config_says_nothing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"can't use .*config\.json: \S") as caught:
        list(plan(load_recipe(TINY, [f"model={tmp_path}"])))
    assert "\n" not in str(caught.value) and not str(caught.value).endswith(":")
