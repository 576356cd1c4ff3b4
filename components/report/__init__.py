"""Reports for people: one self-contained page a run, comparisons of methods and languages, tables, a short summary."""

from components.report.languages import compare_languages
from components.report.methods import compare_methods
from components.report.page import write_page

__all__ = ["compare_languages", "compare_methods", "write_page"]
