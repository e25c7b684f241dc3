"""What is stored of a run: its record, and the folder in which a result lies.

`record` says what a run tells of itself, `record_lines` the same of a training run, and `record_files` how the files are
called. `folder` is read first: how a result lies on the disk; `directory` reaches files without following links, `locking`
keeps other processes out, `writing` replaces a file whole. This room draws nothing and needs no torch.
"""
