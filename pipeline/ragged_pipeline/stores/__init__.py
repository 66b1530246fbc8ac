"""Datasets in object stores: ``s3://``, ``gs://``, ``az://``, ``memory://``, and fsspec's URLs.

The core finds this package through the entry points ``ragged_format.stores``; see
:mod:`ragged_format.storage`. Needs the extra ``ragged-format[store]``.

=================== ====================================================================
``urls``            what a URL and its options say: store, prefix, cache
``calls``           calls of obstore whose errors are those of this package
``objects``         the objects below a prefix: get, put, list, download, conditional put
``object_storage``  the place of a dataset: what the core reads and writes through
``session``         one writer: staging, lease, commit by conditional put
``sweeping``        what crashed and replaced writers left
``fsspec_storage``  read-only places that fsspec knows
``job_output``      a dataset in a store as the output of a job
``file_output``     pages, pictures and exports that end up in a store
``copies``          dumps of other systems in a store, copied for the job that reads them
=================== ====================================================================
"""
