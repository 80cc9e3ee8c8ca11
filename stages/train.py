"""Multi-context GRPO: one agent from its start to models/train/<agent>.

    python -m stages.train memsearcher

The loop is `_steps`. A killed run goes on at its last checkpoint: data order is a pure function of
(seed, step). With train.async_steps 0 engine and learner take turns. With 1 the engine rolls out
the next step while the learner updates, so all but the first step (and the first after a resume or
a restore) are sampled by the policy of one update before; the engine then never sleeps.
"""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from memsearcher import files
from memsearcher.params import Params
from stages.frame import Job, Stage, main

if TYPE_CHECKING:
    from memsearcher.learner.deepspeed import Learner
    from memsearcher.learner.settings import Settings
    from memsearcher.steps import Parts, Rolled
    from memsearcher.training import Log, Record


def _deps(params: Params, item: str | None) -> tuple[str, ...]:
    data = ("data/corpus", "data/index", "data/bm25", "data/questions")
    return (*data, params.agents[item].after)  # type: ignore[index]


STAGE = Stage(
    "train",
    params=(
        *("seed", "world", "bm25", "search", "policy", "agent", "engine", "reward", "train"),
        "agents.{item}",
    ),
    deps=_deps,
    items=lambda params: list(params.agents),
)
SHOWN = ("reward", "em", "turns", "context_tokens_max", "kl", "clip_fraction", "tokens_per_s")
PROBES = 4  # prompts that engine and learner are compared on after each update
KEPT_ROLLOUTS = 4  # trajectories of each step that are written down for people
TRACED = 2  # those of them that become traces on MLflow


def run(job: Job) -> None:
    asyncio.run(_train(job))


async def _train(job: Job) -> None:
    from memsearcher.agent.chat import Chat
    from memsearcher.engine.factory import open_engine
    from memsearcher.learner.deepspeed import Learner, Settings
    from memsearcher.learner.model import check_vocabulary
    from memsearcher.learner.ranks import Ranks
    from memsearcher.policy import policy_folder
    from memsearcher.questions import read_questions
    from memsearcher.retrieval.factory import open_retriever
    from memsearcher.rollout import make_agent
    from memsearcher.steps import Parts

    params, t = job.params, job.params.train
    entry = params.agents[job.item]  # type: ignore[index]
    start = policy_folder(params, entry.after if entry.init == "warmup" else None)
    settings = Settings.of(t, start, job.fingerprint, job.work / "skipped")
    _room(job, settings)
    chat = Chat(start)
    check_vocabulary(start, chat.vocabulary)
    retriever = open_retriever(params)
    agent = make_agent(job.item, params, chat)  # type: ignore[arg-type]
    engine = await open_engine(params, start)  # before the ranks: vLLM reads RANK and its like too
    try:
        learner = Learner.open(settings, Ranks(t.ranks))
        train, dev = (read_questions(Path(f"data/questions/{n}.jsonl")) for n in ("train", "dev"))
        dev = dev[: t.dev_questions]
        for name, context in (("train", "training"), ("dev", "validation")):
            job.track.dataset(name, Path(f"data/questions/{name}.jsonl"), context)
        await _steps(job, Parts(agent, engine, retriever, learner, train, dev, chat))
        learner.close()
    finally:
        await engine.close()


async def _steps(job: Job, parts: "Parts") -> None:
    """questions → trajectories → rewards → advantages → update → weights to the engine → …"""
    from tqdm import tqdm

    from memsearcher import stop_loss, training
    from memsearcher.agent.scoring import with_reward
    from memsearcher.engine.contract import Sampling
    from memsearcher.grpo import group_advantages
    from memsearcher.learner.losses import PolicyLoss
    from memsearcher.loop import both
    from memsearcher.rollout import to_json
    from memsearcher.steps import dev_em, roll
    from memsearcher.transcripts import readable

    params, t, learner = job.params, job.params.train, parts.learner
    loss, keeps_history = PolicyLoss.of(t), job.item == "react"
    sampling = Sampling(
        *(params.agent.max_action_tokens, t.temperature, t.top_p, t.top_k),
        constrained=params.engine.constrained_calls,
    )
    checkpoints = job.work / "checkpoints"
    done = learner.resume(checkpoints)
    log = training.Log(job.work / "metrics.jsonl", done)
    rollouts = training.Log(job.work / "rollouts.jsonl", done)
    if done:
        job.say(f"goes on after step {done}")
        await parts.engine.update_weights(learner.weights())
    elif t.eval_every:
        log.add(first := {"step": 0, "dev_em": await dev_em(params, parts)})
        learner.save(checkpoints, 0, t.keep_checkpoints)
        job.track.metrics(first, step=0)
    rolled: Rolled | None = None

    for step in tqdm(range(done + 1, t.steps + 1), desc=job.label, unit="step", mininterval=2):
        if cause := await training.rescue(
            learner, parts.engine, log, step - 1, t.stop_loss, checkpoints, t.keep_checkpoints
        ):
            job.say(f"stopped after step {step - 1}: {cause}")
            break
        began = time.monotonic()
        if rolled is None or parts.engine.weight_version - rolled.weight_version > t.async_steps:
            rolled = await roll(params, parts, sampling, step)
        training.check_failures(rolled.trajectories, t.max_failed_share)
        trajectories = [with_reward(each, params.reward.preset) for each in rolled.trajectories]
        advantages = group_advantages(
            [each.reward for each in trajectories],
            [each.question.id for each in trajectories],
            valid=[each.failure is None for each in trajectories],
            normalise=t.normalise,
        )
        chosen = training.minibatches(trajectories, advantages, t)
        record: Record = {
            "step": step,
            **training.describe(trajectories, advantages, keeps_history=keeps_history),
        }
        record |= training.staleness(trajectories, parts.engine.weight_version)
        record["seconds_rollout"] = rolled.seconds

        if t.async_steps and step < t.steps:
            figures, rolled = await both(
                asyncio.to_thread(learner.update, chosen, loss),
                roll(params, parts, sampling, step + 1),
            )
        else:
            await parts.engine.sleep()
            figures, rolled = learner.update(chosen, loss), None
            await parts.engine.wake()
        record |= figures

        updated = time.monotonic()
        await parts.engine.update_weights(learner.weights())
        prompts = [each.turns[-1].prompt_ids for each in trajectories if each.turns][:PROBES]
        record["probe_gap"] = await training.probe(
            parts.engine, learner, prompts, sampling, t.probe_bound
        )
        handed = time.monotonic()
        record |= {"weight_version": learner.weight_version, "seconds_weights": handed - updated}
        if t.eval_every and step % t.eval_every == 0:
            record["dev_em"] = await dev_em(params, parts)
            record["seconds_dev"] = time.monotonic() - handed
        record["seconds"] = time.monotonic() - began
        log.add(record)
        shown = trajectories[:: t.group_size][:KEPT_ROLLOUTS]
        rollouts.add(*({"step": step} | to_json(each) for each in shown))
        for each in shown[:TRACED]:
            job.track.trajectory(
                readable(each, parts.chat.decode, keeps_history=keeps_history), step
            )
        job.track.metrics({n: v for n, v in record.items() if not isinstance(v, str)}, step=step)
        job.say(f"step {step}/{t.steps}  {training.brief(record, SHOWN)}")
        top = stop_loss.best(log.rows())
        best = top["step"] if top else 0
        if step % t.checkpoint_every == 0 or step in (best, t.steps):
            learner.save(checkpoints, step, t.keep_checkpoints, best)

    _publish(job, learner, log, rollouts)


def _publish(job: Job, learner: "Learner", log: "Log", rollouts: "Log") -> None:
    """models/train/<agent>: the best policy on dev, or the last one where dev was never asked."""
    from memsearcher import stop_loss, training

    records, policy, t = log.rows(), job.work / "policy", job.params.train
    summary: dict[str, object] = {"agent": job.item, "steps": t.steps, "exported": "last"}
    summary |= training.summarise(records) | {"stop_loss": stop_loss.tripped(records, t.stop_loss)}
    if best := stop_loss.best(records):
        learner.restore(job.work / "checkpoints", best["step"], 1.0)
        summary |= {"exported": "best", "best": {n: best[n] for n in ("step", "dev_em")}}
    files.remove(policy)
    learner.export(policy)
    made = job.work / "results"
    files.write_jsonl(made / "metrics.jsonl", records)
    files.write_jsonl(made / "rollouts.jsonl", rollouts.rows())
    files.write_json(made / "summary.json", summary)
    files.publish(policy, Path(f"models/train/{job.item}"))
    files.publish(made, Path(f"results/train/{job.item}"))
    of = best or {"step": len(records) and records[-1]["step"]}
    model = Path(f"models/train/{job.item}")
    job.track.policy(str(job.item), model, of["step"], {n: of[n] for n in ("dev_em",) if n in of})
    job.track.record(Path(f"results/train/{job.item}/metrics.jsonl"))
    job.track.artifact(Path(f"results/train/{job.item}/summary.json"))


def _room(job: Job, settings: "Settings") -> None:
    """States the disk use before the first step."""
    import torch

    from memsearcher.learner.checkpoint import most_bytes

    weights = sum(p.stat().st_size for p in settings.folder.glob("*.safetensors"))
    bf16 = settings.dtype == torch.bfloat16
    needed = most_bytes(weights, job.params.train.keep_checkpoints, bf16)
    files.require_room(job.work, needed, f"{job.label}: checkpoints and exports")
    job.say(f"checkpoints and exports take up to {needed / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main(STAGE, run)
