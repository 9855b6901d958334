"""The Arrow dataset beside hidden_states/ that speculators >= 0.8 opens; written last, by `RunDirectory.finish`.

Its reader takes row i of the dataset together with hs_i.safetensors, and by default asks a server for the states of a
row that has no file. So the dataset gets a row for each source row, and a row without a sample (skipped, set aside,
missing) gets one token without supervision and a file of zero states. After that reader's shift by one such a row has
length zero. The filler's metadata says `placeholder`; it has no manifest line, so `ShardReader` never sees it and
a resume removes it. All fillers are hard links to one file.
"""

import os
import shutil
from pathlib import Path

from common.shard_writing import HashingFile, temporary_name, write_safetensors
from common.shards import Record, sample_path


def write_arrow_dataset(out: Path, committed: dict[int, Record], rows: int, rows_per_block: int) -> None:
    """Columns input_ids, loss_mask (int64 lists) and seq_len; row i is source row i. Raises OSError (disk full)."""
    import torch
    from datasets import Dataset, Features, Sequence, Value, disable_progress_bars, enable_progress_bars
    from datasets.arrow_writer import ArrowWriter
    from datasets.utils import are_progress_bars_disabled
    from safetensors import safe_open

    temporary = temporary_name(out / "arrow")
    temporary.mkdir()
    numbers = Sequence(Value("int64"))
    features = Features({"input_ids": numbers, "loss_mask": numbers, "seq_len": Value("int64")})
    rows = max(rows, max(committed) + 1)
    with ArrowWriter(path=str(temporary / "rows"), features=features) as writer:
        for index in range(rows):
            ids, mask = [0], [0]
            if record := committed.get(index):
                with safe_open(record.path, "np") as file:
                    ids, mask = file.get_tensor("token_ids"), file.get_tensor("loss_mask")
            writer.write({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)})
        writer.finalize()
    dataset = Dataset.from_file(str(temporary / "rows")).with_format("torch")  # the reader expects tensors to come out
    bars_were_off = are_progress_bars_disabled()
    disable_progress_bars()  # the run has its own
    try:
        dataset.save_to_disk(str(temporary / "saved"))
    finally:
        if not bars_were_off:
            enable_progress_bars()

    with safe_open(next(iter(committed.values())).path, "pt") as file:
        _, num_states, hidden = file.get_slice("hidden_states").get_shape()
        dtype, scales = file.get_slice("hidden_states")[:1].dtype, None
    zeros = [torch.zeros(1, hidden, dtype=dtype) for _ in range(num_states)]
    if dtype == torch.float8_e4m3fn:
        zeros[-1], scales = zeros[-1].to(torch.bfloat16), torch.ones(1, num_states - 1)
    filler, token = temporary / "filler", torch.zeros(1, dtype=torch.int64)
    with open(filler, "wb", buffering=0) as file:
        sink = HashingFile(file.fileno())
        write_safetensors(sink, token, token, zeros, scales, {"placeholder": "this source row has no sample"})
        sink.finish()
    for index in range(rows):
        if index not in committed:
            path = sample_path(out, index, "arrow", rows_per_block)
            path.unlink(missing_ok=True)
            try:
                os.link(filler, path)
            except OSError:
                shutil.copyfile(filler, path)
    for name in sorted(os.listdir(temporary / "saved")):  # state.json, without which it is no dataset, comes last
        os.replace(temporary / "saved" / name, out / name)
    shutil.rmtree(temporary)
