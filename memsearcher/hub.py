"""One large file of the hub: pinned to a commit, gone on with after a kill, checked by its hash.

huggingface_hub's own download goes on after a broken connection, but throws the part away when its
process ends; so the part is kept here, and only the transfer is left to the library.
"""

from pathlib import Path

from memsearcher import files


def download_dataset(
    repo: str, name: str, revision: str | None, folder: Path, endpoint: str | None = None
) -> tuple[Path, str]:
    """(file, commit). What `revision` meant at the first call is kept in the folder and used by the
    later ones. Raises OSError with both values where size or SHA-256 are not the hub's."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    pin, part, out = folder / "pin.json", folder / f"{name}.part", folder / name
    headers = build_hf_headers(token=False)
    if not pin.is_file():
        url = hf_hub_url(repo, name, repo_type="dataset", revision=revision, endpoint=endpoint)
        found = get_hf_file_metadata(url, token=False, endpoint=endpoint)
        if found.commit_hash is None or found.size is None or len(found.etag or "") != 64:
            raise OSError(f"{url}: the hub gives no commit, size or SHA-256: {found}")
        row = {"commit": found.commit_hash, "size": found.size, "sha256": found.etag}
        files.write_json(pin, row)
    wanted = files.read_json(pin)
    if out.is_file():
        return out, wanted["commit"]
    url = hf_hub_url(repo, name, repo_type="dataset", revision=wanted["commit"], endpoint=endpoint)
    with open(part, "ab") as f:
        have = f.tell()
        if have > wanted["size"]:
            have = f.truncate(0)
        files.require_room(folder, wanted["size"] - have, name)
        http_get(url, f, resume_size=have, headers=headers, expected_size=wanted["size"])
    got = files.sha256(part)
    if got != wanted["sha256"]:
        part.unlink()
        raise OSError(f"{url}: SHA-256 is {got}, the hub says {wanted['sha256']}; removed")
    part.rename(out)
    return out, wanted["commit"]
