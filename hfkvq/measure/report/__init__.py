"""Results of lm-eval and of `hfkvq kld`, compared: ``hfkvq compare`` and ``hfkvq report``."""
