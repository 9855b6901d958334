"""One run in a shard directory: open it exclusively, clean what a dead run left, commit, account for every row.

Called by extract.py only. `RunDirectory` is the only committer of the rows it is given; with several replicas each
replica's parent process has its own and whole blocks of rows (`run.blocks()`) belong to one of them at a time.

    run = RunDirectory(out, identity, rows=len(data))     # the leader (rank 0) first, then the others: leader=False
    run.found                                             # what opening repaired, by kind: see `Found`
    for index in run.pending(start, stop): ...            # not committed, not set aside, not skipped
    run.check_row(index, row_hash)                        # UserError when the source row is not the captured one
    run.commit([Record(index, tokens, supervised, written.bytes, written.xxh3, row_hash), ...])     # many a call
    run.put_aside(index, "NaN at point 31, row 17", row_hash)
    run.skip([Skipped(index, "nothing supervised", source), ...])                                   # leader only
    run.note(self_checks={...})                           # into dataset.json under "run"; leader only
    run.block_done(start)                                 # refresh sample_lengths.json
    run.finish(); run.close()                             # finish: leader, after the others; close: all

`identity` is flat JSON that must be equal at resume, and is what readers find in `reader.info`: model, revision,
config_hash, tokenizer_hash, chat_template_hash, capture_points, num_layers, hidden_size, vocab_size, last_state
("pre-norm"), dtype, engine_version, engine_arguments, seed ...
"""
