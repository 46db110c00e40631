"""The console command, also for torchrun's ``-m opendit``."""

from opendit.config.console import answer_interrupts, run_program


def main() -> int:
    answer_interrupts()  # Ctrl-C prints one line, even during the import below
    from opendit.cli.command import main as run

    return run()


if __name__ == "__main__":
    run_program(main)
