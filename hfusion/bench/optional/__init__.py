"""Contenders that need a package of their own, imported when they run: hfusion does without these packages."""
