"""Reports for people: one self-contained page a run, comparisons of methods and languages, tables, a short summary."""

from components.report.pages.drafter import write_page
from components.report.pages.languages import compare_languages
from components.report.pages.methods import compare_methods

__all__ = ["compare_languages", "compare_methods", "write_page"]
