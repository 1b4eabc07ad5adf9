"""The loaders of other trainers, as published: fetched by hash, run on a folder that Aerie wrote.

    python tests/peers.py speculators-0.9.0 FOLDER OUTPUT.safetensors

reads every sample of FOLDER with that version's own loader and writes what it gave, as `{index}.{name}` tensors and
one JSON document in the metadata. A process of its own for each version: two speculators do not fit into one.

The wheels of peers.lock are unzipped side by side and imported from there. What is replaced, and nothing else:
* the `__init__` of the packages `speculators`, `speculators.models` and `speculators.models.eagle3`, which import
  every drafter of the project: an empty package over the same folder, so that their modules are the real files;
* `openai`, which speculators from 0.5 on imports to ask a server for missing states: names for its annotations only.
SpecForge is imported as it is.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

LOCK = Path(__file__).with_name("peers.lock")
DATASETS = ("datasets-5.1.0", "dill-0.4.1", "multiprocess-0.70.19", "xxhash-4.1.0")
BESIDES = {"speculators-0.7.0.2": DATASETS, "speculators-0.9.0": ("hs-connectors-0.9.0", *DATASETS)}


def fetch(name, cache):
    """Return the folder with the unzipped wheel `name` of peers.lock; pip fetches it the first time."""
    folder = Path(cache) / f"{name}-{sys.version_info[0]}{sys.version_info[1]}"
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        # One at a time: pip refuses two versions of a project in one call.
        pin = re.search(rf"^{re.escape('=='.join(name.rsplit('-', 1)))} .*?[^\\]$", LOCK.read_text(), re.M | re.S)
        (temporary / "pin.lock").write_text(pin[0])
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps",
             "--require-hashes", "--only-binary", ":all:", "--dest", temporary, "--requirement", temporary / "pin.lock"],
            check=True,
        )  # fmt: skip
        (wheel,) = temporary.glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(temporary / "unzipped")
        (temporary / "unzipped").rename(folder)
    finally:
        shutil.rmtree(temporary)
    return folder


def read(peer, data, output, cache):
    """Run this file on `data` in a process of its own; warnings of the loader are errors there."""
    folders = [str(fetch(name, cache)) for name in (peer, *BESIDES.get(peer, ()))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-W", "error", __file__, peer, data, output], env=environment, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def empty_package(name):
    """Stand an empty package over the folder of the real one."""
    package = types.ModuleType(name)
    relative = name.replace(".", os.sep)
    package.__path__ = [str(Path(entry, relative)) for entry in sys.path if Path(entry, relative).is_dir()]
    sys.modules[name] = package


def empty_openai():
    openai, chat, completion = (types.ModuleType(f"openai{name}") for name in ("", ".types.chat", ".types.completion"))
    openai.AsyncClient = openai.Client = chat.ChatCompletion = chat.ChatCompletionMessageParam = (
        completion.Completion
    ) = object
    sys.modules |= {"openai": openai, "openai.types": types.ModuleType("openai.types"),
                    "openai.types.chat": chat, "openai.types.completion": completion}  # fmt: skip


def read_v1(folder):
    """speculators 0.3 and 0.4: Eagle3SampleFileDataset, what it gives, and what its transform saw before its shift."""
    import torch

    empty_package("speculators")
    data = importlib.import_module("speculators.train.data")
    whole = []
    dataset = data.Eagle3SampleFileDataset(
        max_len=4096, datapath=folder, transform=lambda batch: whole.append(dict(batch)) or batch,
        hidden_states_dtype=torch.float32,
    )  # fmt: skip
    tensors, lengths = {}, {}
    for number, path in enumerate(dataset.data):
        index = Path(path).stem.split("_")[1]
        shifted = dataset[number]
        tensors |= {f"{index}.whole.{name}": tensor for name, tensor in whole[-1].items()}
        tensors |= {f"{index}.shifted.{name}": tensor for name, tensor in shifted.items()}
        lengths[index] = dataset.approx_lengths[number]
    batch = data.create_collate_fn(64)([dataset[number] for number in range(len(dataset))])
    return tensors, {"lengths": lengths, "batch": list(batch["hidden_states"].shape)}


def stand_in_for_speculators():
    for name in ("speculators", "speculators.models", "speculators.models.eagle3"):
        empty_package(name)
    empty_openai()


def read_legacy(folder):
    """speculators 0.7.0.2, the last with --legacy-data: SampleFileDataset, and the shift that its batches go through."""
    import torch

    stand_in_for_speculators()
    data = importlib.import_module("speculators.train.data")
    shift_batch = importlib.import_module("speculators.models.eagle3.data").shift_batch
    dataset = data.SampleFileDataset(max_len=4096, datapath=folder)
    tensors, lengths = {}, {}
    for number, path in enumerate(dataset.data):
        index = Path(path).stem.split("_")[1]
        whole = dataset[number]
        tensors |= {f"{index}.whole.{name}": tensor for name, tensor in whole.items()}
        tensors |= {f"{index}.shifted.{name}": tensor for name, tensor in shift_batch(dict(whole)).items()}
        lengths[index] = dataset.approx_lengths[number]
    width = whole["verifier_last_hidden_states"].shape[1]
    collate = data.CollateFn(64, width, dtype=torch.float32, preprocess=shift_batch)
    batch = collate([dataset[number] for number in range(len(dataset))])
    return tensors, {"lengths": lengths, "batch": list(batch["hidden_states"].shape)}


def read_arrow(folder):
    """speculators 0.9: ArrowDataset with its FileTransfer, its own checks and count, and its shift."""
    import torch

    stand_in_for_speculators()
    data = importlib.import_module("speculators.train.data")
    offline = importlib.import_module("speculators.data_generation.offline")
    vocabulary = importlib.import_module("speculators.train.vocab_mapping")
    shift_batch = importlib.import_module("speculators.models.eagle3.data").shift_batch
    dataset = data.ArrowDataset(max_len=4096, datapath=folder, on_missing="raise")
    states = Path(folder, "hidden_states")
    existing = offline.get_existing_hidden_state_indices(states)
    counted = Path(folder).parent / "counted.pt"
    vocabulary.save_token_frequency_distribution(dataset.data, counted)
    tensors = {}
    for index in range(len(dataset)):
        whole = dataset[index]
        offline.check_hidden_states(dataset.transfer.get_cached(index), dataset.data[index]["input_ids"].tolist())
        tensors |= {f"{index}.whole.{name}": tensor for name, tensor in whole.items()}
        tensors |= {f"{index}.shifted.{name}": tensor for name, tensor in shift_batch(dict(whole)).items()}
    collate = data.CollateFn(64, whole["verifier_last_hidden_states"].shape[1], preprocess=shift_batch)
    batch = collate([dataset[index] for index in range(len(dataset))])
    return tensors, {
        "lengths": {str(index): length for index, length in enumerate(dataset.approx_lengths)},
        "existing": existing,
        "corrupt": offline.find_corrupt_hidden_state_indices(states, existing),
        "counts": [
            sorted(torch.load(path, weights_only=True).items()) for path in (Path(folder, "token_freq.pt"), counted)
        ],
        "batch": list(batch["hidden_states"].shape),
        "dropped": batch["error_records"],
    }


def read_specforge(folder):
    """SpecForge 0.2: its reader (every file opened and checked), store, loader and normaliser."""
    eagle3 = importlib.import_module("specforge.algorithms.eagle3.data")
    plane = importlib.import_module("specforge.runtime.data_plane")
    os.environ["SPECFORGE_VALIDATE_OFFLINE_FEATURES"] = "1"
    refs = eagle3.build_offline_reader(folder, run_id="run", ttt_length=7, max_len=4096).read()
    loader = plane.FeatureDataLoader(
        plane.LocalFeatureStore(), refs=refs, per_sample_transform=eagle3.build_offline_normalizer(4096),
        collate_fn=eagle3.build_server_collator(),
    )  # fmt: skip
    stored = {ref.sample_id: plane.load_feature_file(ref.feature_store_uri.removeprefix("file://")) for ref in refs}
    tensors, order = {}, []
    for ref, batch in zip(refs, loader, strict=True):
        index = Path(ref.feature_store_uri).stem.split("_")[1]
        order.append(int(index))
        tensors |= {f"{index}.stored.{name}": tensor for name, tensor in stored[ref.sample_id].items()}
        tensors |= {f"{index}.loaded.{name}": tensor for name, tensor in batch.tensors.items()}
    return tensors, {"order": order, "tokens": [ref.num_tokens for ref in refs]}


READERS = {
    "speculators-0.3.0": read_v1,
    "speculators-0.4.0": read_v1,
    "speculators-0.7.0.2": read_legacy,
    "speculators-0.9.0": read_arrow,
    "specforge-0.2.0": read_specforge,
}


def main(peer, folder, output):
    from safetensors.torch import save_file

    tensors, facts = READERS[peer](folder)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, output, {"facts": json.dumps(facts)})


if __name__ == "__main__":
    main(*sys.argv[1:])
