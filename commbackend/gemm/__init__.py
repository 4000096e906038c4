"""GEMM providers: one file each, implementing ``commbackend.contract.GemmProvider``."""

if __name__ != "commbackend.gemm":
    raise ImportError("import commbackend.gemm: the folder 'gemm' at the repository's root is only a link to it")
