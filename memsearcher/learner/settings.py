"""What a learner is told once: where it starts, how it steps, how it is spread over devices."""

from dataclasses import dataclass
from pathlib import Path

import torch

from memsearcher.params import Train


@dataclass(frozen=True, slots=True)
class Settings:
    """`folder` is the starting policy, `reference` the frozen one (None: no KL term). `run` names
    the run in its checkpoints; `dumps` is where the batch of a non-finite step is written. `bf16`
    None: on a GPU."""

    folder: Path
    lr: float
    max_tokens_per_microbatch: int
    reference: Path | None = None
    temperature: float = 1.0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_warmup_steps: int = 0
    zero_stage: int = 0
    offload: bool = False
    gradient_checkpointing: bool = False
    run: str = ""
    dumps: Path | None = None
    bf16: bool | None = None

    @classmethod
    def of(cls, train: Train, folder: Path, run: str, dumps: Path) -> "Settings":
        return cls(
            folder=folder,
            reference=folder if train.kl_coef else None,
            lr=train.lr,
            max_tokens_per_microbatch=train.max_tokens_per_microbatch,
            temperature=train.temperature,
            weight_decay=train.weight_decay,
            max_grad_norm=train.max_grad_norm,
            zero_stage=train.zero_stage,
            offload=train.offload,
            gradient_checkpointing=train.gradient_checkpointing,
            run=run,
            dumps=dumps,
            bf16=None if train.dtype is None else train.dtype == "bfloat16",
        )

    @property
    def dtype(self) -> torch.dtype:
        bf16 = torch.cuda.is_available() if self.bf16 is None else self.bf16
        return torch.bfloat16 if bf16 else torch.float32

    def for_deepspeed(self) -> dict[str, object]:
        """DeepSpeed's configuration. Accumulation is ours: 1 here, and the learner sets the
        boundary by hand before each backward pass."""
        bf16 = self.dtype == torch.bfloat16
        # DeepSpeed 0.19.8's stage 0 in bfloat16 moved weights by 0.73 of Adam's first step.
        zero: dict[str, object] = {"stage": max(int(bf16), self.zero_stage)}
        if self.offload and zero["stage"]:
            zero["offload_optimizer"] = {"device": "cpu"}
            if self.zero_stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        # Otherwise micro-batches are summed in bfloat16, and their number changes the gradient.
        sums = {"data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}
        return {
            **sums,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": bf16},
            "steps_per_print": 10**9,
        }
