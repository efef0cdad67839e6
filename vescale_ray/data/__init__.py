"""Data sets: samples of tokens by id, and the order in which they are read, with one integer as its whole state.

``dataset`` is the interface. ``dataset_loading`` opens the data that the configuration names. ``sources.corpus`` holds local text as bytes
in memory; its order is the permutation of ``order.stream``. ``block_dataset`` reads everything else in blocks: ``sources.files`` finds the
files, ``sources.token_files`` and ``sources.document_files`` read them, ``text.encoders`` make tokens, ``order.block_order`` shuffles with
locality, and ``sources.read_ahead`` hides the storage's latency. ``sources.chat_files`` and ``text.chat`` do so for fine-tuning rows.
``mixture`` takes samples from several such sources in proportions that ``order.shares`` keeps exact. ``given_dataset`` reads an object of
the caller, and ``preparation`` tokenizes documents before a run. ``text.prompts`` encodes single texts, and
``loading_figures`` tells the metrics what was read and left out. Imports numpy, torch, pyarrow and fsspec, and no higher layer of this
package.
"""
