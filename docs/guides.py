"""Guides, gathered for the API reference that `make docs` builds.

.. include:: choosing.md

.. include:: schemes.md

.. include:: saved_prompts.md

.. include:: serving.md

.. include:: speed.md

.. include:: evaluation.md

.. include:: real_model.md

.. include:: models.md

.. include:: tuning.md

.. include:: agents.md

.. include:: results.md

.. include:: papers.md
"""
