"""Commands of ``ragged`` that run jobs, one module each."""
