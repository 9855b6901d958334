"""Looking at a shard directory without changing it: verify, status, and the arithmetic of a plan.

    verification = verify(out, repair=False, threads=8, progress=None)   # reads everything; .clean, .lines(), .as_dict()
    report = status(out)                                                 # dict for --json; cheap
    print(status_text(report))                                           # for people
    plan_bytes(lengths, num_points, hidden_size, dtype="bfloat16")       # bytes on disk for these samples
    require_disk(out, need_bytes, force=False)                           # UserError when they do not fit
"""
