"""``gpusched completion``: the script a shell needs to complete job ids, nodes, partitions, flavors and options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from gpusched.cli import output

app = typer.Typer()

_BASH = """\
# gpusched completion for bash. Use it with:  source <(gpusched completion bash)
_gpusched_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
                   _GPUSCHED_COMPLETE=complete_bash "$1" 2>/dev/null ) )
    return 0
}
complete -o default -F _gpusched_completion gpusched
"""
_ZSH = """\
#compdef gpusched
# gpusched completion for zsh. Use it with:  source <(gpusched completion zsh)
_gpusched_completion() {
    eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _GPUSCHED_COMPLETE=complete_zsh gpusched 2>/dev/null)
}
if [ "$funcstack[1]" = "_gpusched" ]; then _gpusched_completion; else compdef _gpusched_completion gpusched; fi
"""


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"


@app.command("completion")
def completion(
    shell: Annotated[Shell, typer.Argument(help="Your shell.")],
    json: output.JsonOption = False,
) -> None:
    """Print the completion script: source <(gpusched completion bash)."""
    script = _BASH if shell is Shell.BASH else _ZSH
    if json:
        output.emit_json({"shell": shell, "script": script})
    else:
        output.print_line(script.rstrip())
