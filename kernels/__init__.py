"""Operations of the engine, one package each: reference.py (fp32, obvious), eager.py (torch), fused.py. Kept import-light."""
