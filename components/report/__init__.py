"""Reports for people: one self-contained page a run, comparisons of methods and languages, tables, a short summary."""

from components.report.steps import compare_languages, compare_methods, write_page

__all__ = ["compare_languages", "compare_methods", "write_page"]
