"""Data sets: samples of tokens by id, and the order in which they are read, with one integer as its whole state.

``dataset`` is the interface. ``dataset_loading`` opens the data that the configuration names. ``corpus`` holds local text as bytes in
memory; its order is the permutation of ``stream``. ``block_dataset`` reads everything else in blocks: ``files`` finds the files,
``token_files`` and ``document_files`` read them, ``encoders`` make tokens, ``block_order`` shuffles with locality, and ``read_ahead`` hides
the storage's latency. ``chat_files`` and ``chat`` do so for fine-tuning rows. ``mixture`` takes samples from several such sources in
proportions that ``shares`` keeps exact. ``given_dataset`` reads an object of the caller, and ``preparation`` tokenizes documents before a
run. ``prompts`` encodes single texts. Imports numpy, torch, pyarrow and fsspec, and no higher layer of this package.
"""
