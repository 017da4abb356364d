"""What the papers' study needs and the wheel does not: its report, its bench, its tables."""
