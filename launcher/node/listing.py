"""Lists of files, printed on a node by GNU's find, or by BusyBox's, which has no -printf."""

from __future__ import annotations

# Of one file: what GNU's find prints, `<kind> <bytes> <time> <path>`, then a NUL; the time in whole seconds. A process
# for each file, which a name with a line break requires. %f: the mode of stat(2), whose first digits are the kind.
_BY_STAT = r"""
for path; do
  found=$(stat -c "%f %s %Y" -- "$path" 2>/dev/null) || continue # removed meanwhile
  case $found in 8*) kind=f ;; a*) kind=l ;; 1*) kind=p ;; c*) kind=s ;; 6*) kind=b ;; 2*) kind=c ;; *) continue ;; esac
  printf "%s %s %s\0" "${HARD:-$kind}" "${found#* }" "${path#./}"
  [ -z "$TARGETS" ] || if [ $kind = l ]; then printf "%s\0" "$(readlink -- "$path")"; else printf "\0"; fi
done
"""
# Functions for a script. has_printf: whether find has -printf. by_stat COMMAND ...: run a find whose -exec is given as
# `-exec sh -c "$by_stat" sh {} +`.
HELPERS = f"""
has_printf() {{ find . -maxdepth 0 -printf '' 2>/dev/null; }}
by_stat='{_BY_STAT}'
"""
