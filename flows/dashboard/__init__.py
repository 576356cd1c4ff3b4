"""The dashboard of a home: one page that says what runs have brought."""
